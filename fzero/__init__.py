"""ZeRO (stages 0 to 3) for functional PyTorch."""

from fzero.block import Sharded as Sharded
from fzero.block import block as block
from fzero.block import remat as remat
from fzero.export import export as export
from fzero.hooked import HookedZero as HookedZero
from fzero.loading import latest as latest
from fzero.loading import load as load
from fzero.manifest import CheckpointError as CheckpointError
from fzero.module import from_module as from_module
from fzero.optim import AdamWState as AdamWState
from fzero.optim import LionState as LionState
from fzero.optim import SGDState as SGDState
from fzero.optim import adam as adam
from fzero.optim import adamw as adamw
from fzero.optim import lion as lion
from fzero.optim import sgd as sgd
from fzero.overlap import Overlap as Overlap
from fzero.precision import Precision as Precision
from fzero.rule import Label as Label
from fzero.rule import Optimizer as Optimizer
from fzero.saving import save as save
from fzero.schedule import constant as constant
from fzero.schedule import warmup_cosine as warmup_cosine
from fzero.schedule import warmup_linear as warmup_linear
from fzero.state import Mean as Mean
from fzero.state import Metrics as Metrics
from fzero.state import State as State
from fzero.zero import Zero as Zero

__version__ = "0.1.0"
