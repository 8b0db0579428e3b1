"""Loading a part of a quantized model alone, such as the text model of one for images and text."""

from functools import wraps


def keep_quantization_config(get_config_dict):
    """``get_config_dict``, of whose result a configuration of a part takes what is of that part: with it what is said
    of the whole model's quantization."""

    @wraps(get_config_dict)
    def wrapped(cls, *args, **kwargs):
        content, unused = get_config_dict(cls, *args, **kwargs)
        found = content.get("quantization_config")
        is_part = cls.model_type and content.get("model_type") != cls.model_type
        if is_part and isinstance(found, dict) and found.get("quant_method") == "kbit":
            for key, part in content.items():
                if isinstance(part, dict) and (key == cls.base_config_key or part.get("model_type") == cls.model_type):
                    part.setdefault("quantization_config", found)
        return content, unused

    return wrapped
