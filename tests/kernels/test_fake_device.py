"""The device of the fake CuPy, where a test of the package cannot show a mistake of the fake itself."""

import gc

from fake_cupy.device import Device, Work


def test_a_stream_that_is_destroyed_while_work_runs():
    """The garbage collector may destroy a stream at any time. Its work runs first, and other streams wait for it."""
    device, ran = Device(), []
    first, second = device.create_stream(False), device.create_stream(False)

    def destroys(*streams):
        for stream in streams:
            device.destroy_stream(stream)
        ran.append("destroyed")

    device.submit(first, Work(lambda: destroys(first, second)))
    device.submit(first, Work(lambda: ran.append(first)))
    device.submit(second, Work(lambda: ran.append(second)))
    device.submit(0, Work(lambda: ran.append(0)))  # waits for the others
    device.wait(0)
    assert sorted(map(str, ran)) == sorted(map(str, ("destroyed", first, second, 0)))
    assert list(device.queues) == [0]
    assert {device.create_stream(False), device.create_stream(False)} == {first, second}


def test_memory_is_freed_after_the_finalizers_of_a_cycle(fake):
    """A finalizer may wait for work that reads an array of the same cycle, also if the array is older."""
    pool = fake.get_default_memory_pool()
    array, before, used = fake.empty(512), pool.used_bytes(), []

    class Owner:
        def __init__(self, array):
            self.array, self.itself = array, self

        def __del__(self):
            used.append(pool.used_bytes())

    Owner(array)
    del array
    gc.collect()
    assert used == [before]
    assert pool.used_bytes() == before - 512 * 8
