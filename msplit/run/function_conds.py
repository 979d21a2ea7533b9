"""Train steps without what the cuda engine has no graph for, as far as that can be said otherwise.

A cond that assigns becomes two calls, and each assignment inside of them one of a chosen value: the new one on the side that is taken, else
what the variable has, and where it adds, zeros. Keras accumulates gradients so, scales losses and overwrites weights by their averages. And
what XLA would compile as a whole is a call like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msplit.opset.traits import CALLS, ops_with, written

_CONDS = ops_with("if")
_ASSIGNS = frozenset({"AssignVariableOp"})
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"}) | ops_with("adds rows")
"""What is added, to all or to some rows, comes last among the inputs."""
_BOOL, _NO_VALUES = 10, frozenset({20, 21})  # DT_BOOL; DT_RESOURCE and DT_VARIANT
_COMPILED = "_XlaMustCompile"


def straighten(graph_def: Any) -> None:
    """Changes a GraphDef in place: conds and compiled calls that write variables. A cond in which something else than an assignment
    writes, or a loop assigns, stays as it is."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    changing = _changing(functions)
    for body in [graph_def.node, *(function.node_def for function in functions.values())]:
        for node in body:
            if _COMPILED in node.attr and not changing.isdisjoint(_called(node)):
                del node.attr[_COMPILED]
    conds = _Conds(graph_def.library, {name: _copy(functions[name]) for name in functions}, changing)
    for name in sorted(changing):
        conds.straighten(functions[name], None)


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _called(node: Any) -> Iterator[str]:
    """Functions that a node calls."""
    for attr in node.attr.values():
        if attr.HasField("func"):
            yield attr.func.name
        yield from (function.name for function in attr.list.func)


def _changing(functions: Mapping[str, Any]) -> set[str]:
    """Functions that write variables, themselves or in what they call."""
    callers: dict[str, set[str]] = {}
    found = set()
    for name, function in functions.items():
        for node in function.node_def:
            for called in _called(node):
                callers.setdefault(called, set()).add(name)
        if any(written(node.op) for node in function.node_def):
            found.add(name)
    pending = list(found)
    while pending:
        new = callers.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


class _Conds:
    """A library, and those of its functions that were made anew: what they assign is chosen by one argument more."""

    def __init__(self, library: Any, originals: Mapping[str, Any], changing: set[str]) -> None:
        self.library, self.originals, self.changing = library, originals, changing
        self.guarded: dict[str, str] = {}
        self.known: dict[str, bool] = {}

    def straighten(self, function: Any, only_if: str | None) -> None:
        """Changes a function in place.

        Args:
            only_if: The argument that says whether it writes; None: it does.
        """
        instead: dict[str, str] = {}  # of outputs of conds
        sides: dict[str, tuple[str, str]] = {}  # of conds
        nodes: list[Any] = []
        for node in map(_copy, function.node_def):
            if self._writes(node) and self._is_plain(node) and self._fits(node):
                for number in range(len(node.attr["Tout"].list.type)):
                    instead[f"{node.name}:output:{number}"] = f"{node.name}/chosen_{number}:output:0"
                sides[node.name] = f"{node.name}/then", f"{node.name}/else"
                nodes += self._both(node, only_if)
                continue
            if only_if is not None and written(node.op):
                nodes += _chosen(node, only_if)
            elif only_if is not None and self._writes(node):
                self._give(node, only_if)
            nodes.append(node)
        if not sides and only_if is None:
            return
        for node in nodes:
            given: list[str] = []
            for text in node.input:
                if text.startswith("^") and text[1:] in sides:
                    given += [f"^{side}" for side in sides[text[1:]]]
                else:
                    given.append(instead.get(text, text))
            node.input[:] = given
        del function.node_def[:]
        function.node_def.extend(nodes)
        for name, text in list(function.ret.items()):
            function.ret[name] = instead.get(text, text)
        for name, text in list(function.control_ret.items()):
            if text in sides:
                function.control_ret[name], function.control_ret[f"{name}_else"] = sides[text]
                function.signature.control_output.append(f"{name}_else")

    def _writes(self, node: Any) -> bool:
        """Whether a node calls what writes."""
        return not self.changing.isdisjoint(_called(node))

    def _is_plain(self, node: Any) -> bool:
        """Whether a node is a cond of a truth value that gives values."""
        attr = node.attr
        return node.op in _CONDS and attr["Tcond"].type == _BOOL and _NO_VALUES.isdisjoint(attr["Tout"].list.type)

    def _fits(self, node: Any) -> bool:
        """Whether all that a node writes can be chosen."""
        if written(node.op):
            return node.op in _ASSIGNS | _ADDS
        if not self._writes(node):
            return True
        return (node.op in CALLS or self._is_plain(node)) and all(map(self._all_fit, _called(node)))

    def _all_fit(self, name: str) -> bool:
        if name in self.changing and name not in self.known:
            self.known[name] = False  # for one that calls itself
            self.known[name] = all(map(self._fits, self.originals[name].node_def))
        return self.known.get(name, True)

    def _both(self, node: Any, only_if: str | None) -> list[Any]:
        """A cond's sides as calls, and its outputs chosen from theirs."""
        condition, *given = (text for text in node.input if not text.startswith("^"))
        waits = [text for text in node.input if text.startswith("^")]
        made = [_node(node, "not", "LogicalNot", [condition])]
        for side, is_it in (("then", condition), ("else", f"{node.name}/not:y:0")):
            if only_if is not None:
                made.append(_node(node, f"{side}_if", "LogicalAnd", [is_it, only_if]))
                is_it = f"{node.name}/{side}_if:z:0"
            call = _node(node, side, "StatefulPartitionedCall", [*given, *waits])
            for name in ("Tin", "Tout"):
                call.attr[name].CopyFrom(node.attr[name])
            call.attr["f"].CopyFrom(node.attr[f"{side}_branch"])
            if self._writes(call):
                self._give(call, is_it)
            made.append(call)
            waits = [
                f"^{call.name}"
            ]  # one after the other: what is assigned there already may be what the other side has just assigned
        for number, dtype in enumerate(node.attr["Tout"].list.type):
            both = [f"{node.name}/{side}:output:{number}" for side in ("then", "else")]
            made.append(_node(node, f"chosen_{number}", "SelectV2", [condition, *both], T=dtype))
        return made

    def _give(self, call: Any, only_if: str) -> None:
        """Has a call say whether what it calls writes."""
        name = call.attr["f"].func.name
        if name not in self.guarded:
            made = _copy(self.originals[name])
            made.signature.name = self.guarded[name] = f"{name}_only_if"
            made.attr.pop("_input_shapes", None)  # they have as many entries as arguments
            argument = made.signature.input_arg.add(name="only_if_it_is_so", type=_BOOL)
            self.straighten(made, argument.name)
            self.library.function.append(made)
        call.attr["f"].func.name = self.guarded[name]
        call.attr["Tin"].list.type.append(_BOOL)
        place = next((at for at, text in enumerate(call.input) if text.startswith("^")), len(call.input))
        call.input.insert(place, only_if)
        call.attr.pop("_read_only_resource_inputs", None)


def _chosen(assign: Any, only_if: str) -> list[Any]:
    """Has an assignment assign what was there already, or add nothing, unless an argument says so; and what that takes."""
    last = max(number for number, text in enumerate(assign.input) if not text.startswith("^"))
    handle, value, waits = assign.input[0], assign.input[last], assign.input[last + 1 :]
    dtype = assign.attr["dtype"].type
    if assign.op in _ADDS:
        other = _node(assign, "nothing", "ZerosLike", [value], T=dtype)
        otherwise = f"{other.name}:y:0"
    else:
        other = _node(assign, "before", "ReadVariableOp", [handle, *waits], dtype=dtype)
        otherwise = f"{other.name}:value:0"
    choice = _node(assign, "chosen", "SelectV2", [only_if, value, otherwise], T=dtype)
    assign.input[last] = f"{choice.name}:output:0"
    return [other, choice]


def _node(beside: Any, name: str, op: str, inputs: list[str], **types: int) -> Any:
    made = type(beside)(name=f"{beside.name}/{name}", op=op, input=inputs, device=beside.device)
    for key, dtype in types.items():
        made.attr[key].type = dtype
    return made
