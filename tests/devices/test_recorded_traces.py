from pliant.devices import Fleet, RecordedAvailability, RecordedTrace


def make_device(speed, index=0):
    return Fleet(size=10, speed=speed).device(index)


def test_a_device_replays_the_recording_of_its_number(tmp_path):
    file = tmp_path / "two.csv"
    file.write_text("device,seconds,speed\na,100,1.0\na,102,0.5\nb,101,0.25\n")
    speed = RecordedTrace(path=str(file))
    assert [make_device(speed, index).work(0.0, 4.0) for index in range(4)] == [3.0, 1.0, 3.0, 1.0]
    repeated = RecordedTrace(path=str(file), period=4.0)
    assert make_device(repeated).work(0.0, 8.0) == 6.0


def test_a_device_is_on_between_active_and_inactive(tmp_path):
    file = tmp_path / "behaviour.json"
    file.write_text(
        '{"7": {"duration": 3, "active": [1, 5], "inactive": [3, 6], "finish_time": 8,'
        ' "model": "x"},'
        ' "9": {"duration": 0, "active": [], "inactive": [], "finish_time": 8}}'
    )
    device = make_device(RecordedAvailability(path=str(file)))
    speeds = [device.speed(time) for time in (0.0, 1.0, 2.9, 3.0, 5.5, 6.0, 9.5)]
    assert speeds == [0, 1, 1, 0, 1, 0, 1]
    assert device.work(0.0, 16.0) == 6.0
    assert make_device(RecordedAvailability(path=str(file)), 1).work(0.0, 16.0) == 0.0
