"""What becomes of a model that was quantized in memory."""

import sys

from transformers import PreTrainedModel

from hf_kbit.integrations.transformers.inputs import set_where_possible
from hf_kbit.integrations.transformers.offload import keep_tables
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.integrations.transformers.report import report_exceptions
from hf_kbit.nn.weight import packed_layers
from hf_kbit.plan.plan import Plan


def finish(plan: Plan) -> None:
    """Makes a model of which a plan was carried out what loading would have made it."""
    model = plan.model
    if "peft" in sys.modules:
        from hf_kbit.integrations.peft.base import adopt

        adopt(model)  # adapters that were there
    if isinstance(model, PreTrainedModel):
        KbitHfQuantizer(plan.config, pre_quantized=False).adopt(plan)
    else:
        set_where_possible(packed_layers(model), plan.config.inputs)
        report_exceptions(plan.outcome)
    if plan.config.embedding_device is not None:
        keep_tables(model, asked=True)
