"""Text in YAML, which JSON is part of."""

import yaml


def parse_yaml(text: str) -> object:
    """What the text holds. Raises ValueError, in one line, if it is no YAML."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # The latter three: a date that is none, an empty number and the like.
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("not valid YAML: too deeply nested") from None
