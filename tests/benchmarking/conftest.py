import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models are slower, not faster, on several threads, and other tests may run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
