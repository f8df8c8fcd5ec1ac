"""Version of the distribution, which the build and the ApiVersions request read from here.

Between two releases it is the development version of the next one (PEP 440), so that pip replaces one by the other.
"""

__version__ = "0.2.0.dev0"
