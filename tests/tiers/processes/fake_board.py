"""A board that processes of a test share in one thread: what is collected has been posted by all."""

from __future__ import annotations


class FakeBoard:
    def __init__(self, index: int, texts: dict[str, dict[int, str]], num_processes: int) -> None:
        self.index = index
        self._texts = texts
        self._num_processes = num_processes

    @classmethod
    def of(cls, num_processes: int) -> list[FakeBoard]:
        texts: dict[str, dict[int, str]] = {}
        return [cls(i, texts, num_processes) for i in range(num_processes)]

    def post(self, topic: str, text: str) -> None:
        assert self.index not in self._texts.setdefault(topic, {}), "a topic comes once"
        self._texts[topic][self.index] = text

    def collect(self, topic: str) -> list[str]:
        return [self._texts[topic][i] for i in range(self._num_processes)]

    def exchange(self, topic: str, text: str) -> list[str]:
        self.post(topic, text)
        return self.collect(topic)
