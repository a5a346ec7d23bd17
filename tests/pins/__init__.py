"""This package beside others that pin an older Gymnasium: `make test-pins` installs and runs them."""
