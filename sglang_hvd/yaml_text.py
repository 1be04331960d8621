"""Parses YAML, of which JSON is a part."""

from typing import Any

import yaml


def parse_yaml(text: str) -> object:
    """The value in a text.

    Raises ValueError, in one line, if the text is no YAML or has a key twice in one mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # PyYAML raises the last three for an impossible date, an empty number and the like.
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("not valid YAML: too deeply nested") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice; PyYAML would use its last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in known:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key.value} is there twice")
                known.add((key.tag, key.value))
        return node
