"""`bridge.core.client.realtime.unseen_frames`: which frames nobody has shown."""

from bridge.core.client.realtime.unseen_frames import UnseenFrames


def test_whether_a_first_observation_is_of_a_frame_is_learned_from_what_follows() -> None:
    """Frames 1 and 2 had passed when the episode was entered; the server never showed the first."""
    frames = UnseenFrames()
    first = frames.arrived(1, 10.0, 0, 1)
    third = frames.arrived(1, 10.1, 3, 1)  # tells of frames 1 to 3
    assert first.of_frame
    assert frames.told(third, 1) == 2, "the first and the second"
    again = frames.arrived(1, 10.1, 0, 1)
    assert again is third
    assert frames.so_far(1) == 2


def test_a_first_observation_of_a_reset_is_no_frame() -> None:
    frames = UnseenFrames()
    frames.arrived(1, 10.0, 0, 0)
    assert frames.told(frames.arrived(1, 10.2, 2, 1), 1) == 1, "the server skipped the first"
    new = frames.arrived(2, 10.2, 0, 1)
    assert new.sent == 1, "the same moment, but another episode"
    assert frames.told(frames.arrived(2, 10.3, 1, 1), 1) == 1
