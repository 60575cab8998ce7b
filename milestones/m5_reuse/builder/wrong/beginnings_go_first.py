"""Gives up any unused block, the first of a prompt before its last: what comes behind it can never be found again."""

from __future__ import annotations

from folovllm.learn.builders.reference import Node
from folovllm.learn.builders.reference import PrefixCache as Right


class PrefixCache(Right):
    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        nodes = list(self._roots.values())
        for node in nodes:
            nodes += node.children.values()
        unused = [node for node in nodes if node.parent and not node.num_holders]
        self._lose(unused[0])
        self._stats.evictions += 1
        return self._blank.pop()

    def _lose(self, node: Node) -> None:
        assert node.parent is not None
        for child in list(node.children.values()):
            self._lose(child)
        del node.parent.children[node.tokens]
        node.parent = None
        self._num_unused -= 1
        self._blank.append(node.block_id)
