"""Settings for every test."""

import os

from hypothesis import settings

# A test that takes long is no wrong answer, and machines are shared. CI tries the same examples each time; everyone else new ones.
settings.register_profile("msplit", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("msplit")
