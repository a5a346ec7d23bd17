"""The standalone server in old Pythons, beside today's client: `make test-versions` installs and runs them."""
