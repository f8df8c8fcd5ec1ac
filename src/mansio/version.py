"""Version of the distribution, which the build and the ApiVersions request read from here."""

__version__ = "0.1.0"
