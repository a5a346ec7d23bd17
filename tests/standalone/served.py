"""What tests of the standalone server serve."""

ENVS = "tests.standalone_envs"


OLD = "tests.old_style_env"
