"""The standalone server in old Pythons, beside today's client: `make test-standalone` installs and runs them."""
