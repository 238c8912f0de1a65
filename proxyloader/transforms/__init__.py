"""torchvision transforms in, a Plan out. Knows nothing of DALI."""

from . import auto as auto
from . import choice as choice
from . import color as color
from . import convert as convert
from . import corrupt as corrupt
from . import geometry as geometry
from . import random_warp as random_warp
from . import resize as resize
from . import views as views
from . import warp as warp
from .compiled import CompiledTransform as CompiledTransform
from .compiled import compile_transforms as compile_transforms
from .plan import Plan as Plan
