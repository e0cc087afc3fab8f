from __future__ import annotations

from hypothesis import settings

# No test asserts a time: on a busy machine an example may take as long as it likes.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
