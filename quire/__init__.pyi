from quire.core.scheduling_params import Retention as Retention
from quire.engine.outputs import BeamSearchOutput as BeamSearchOutput
from quire.engine.outputs import BeamSearchSequence as BeamSearchSequence
from quire.engine.outputs import ClassificationOutput as ClassificationOutput
from quire.engine.outputs import ClassificationRequestOutput as ClassificationRequestOutput
from quire.engine.outputs import CompletionOutput as CompletionOutput
from quire.engine.outputs import EmbeddingOutput as EmbeddingOutput
from quire.engine.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from quire.engine.outputs import RequestOutput as RequestOutput
from quire.engine.outputs import ScoringOutput as ScoringOutput
from quire.engine.outputs import ScoringRequestOutput as ScoringRequestOutput
from quire.llm import LLM as LLM
from quire.params import BeamSearchParams as BeamSearchParams
from quire.params import ReasoningParams as ReasoningParams
from quire.params import RepetitionDetectionParams as RepetitionDetectionParams
from quire.params import SamplingParams as SamplingParams
from quire.params import StructuredOutputsParams as StructuredOutputsParams
from quire.planner.report import plan as plan
from quire.planner.reproduce.run import reproduce as reproduce
from quire.planner.simulate import simulate as simulate
from quire.server.batch.run import run_batch as run_batch
from quire.server.serve import serve as serve
from quire.startup.doctor import examine as examine
from quire.startup.latency_calibration import calibrate as calibrate
from quire.startup.quantize import quantize as quantize

__version__: str
