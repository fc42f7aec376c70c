"""Errors are compared word by word."""

import pytest


def says(error, message, make, *args, **kwargs):
    with pytest.raises(error) as caught:
        make(*args, **kwargs)
    assert str(caught.value) == message
