"""What arrives by an exchange, as messages."""

import pytest
import torch

from natgrad.comm.transfers import Arrived, CommunicationError
from natgrad.kfac.ranks.shipments import Parcels


def test_words_become_messages_of_their_sizes():
    first, second = Parcels(Arrived(torch.arange(5)), [2, 3]).wait()
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])


@pytest.mark.parametrize("count", [4, 6])
def test_another_message_in_the_place_of_one_is_refused(count):
    """As where one came twice: its second copy is taken for the next one."""
    with pytest.raises(CommunicationError, match=f"{count} words have come where 5 were to come"):
        Parcels(Arrived(torch.zeros(count)), [2, 3]).wait()
