"""An older version of this package, kept as a wheel, and the process in which a test runs it."""
