"""One public class name stands for one thing."""

import ast
from collections import defaultdict
from pathlib import Path

import pliant

PACKAGE = Path(pliant.__file__).parent


def test_no_public_class_name_is_used_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 200  # the package was found
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_every_exported_name_exists():
    for name in pliant._read_exports():
        assert getattr(pliant, name) is not None
    assert "simulate" in dir(pliant)
