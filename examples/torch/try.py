"""Builds extension.cu with PyTorch's own builder, which needs nvcc and ninja, and compares it with float64."""
import pathlib
import sys

import torch
from torch.utils import cpp_extension

if not torch.cuda.is_available():
    print("skipped: no GPU")
    sys.exit(77)
here = pathlib.Path(__file__).resolve().parent
major, minor = torch.cuda.get_device_capability()
gpu = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
cpp_extension.load(
    "kernels_example", [str(here / "extension.cu")], extra_include_paths=[str(here.parents[1] / "include")],
    extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{gpu},code=sm_{gpu}"], is_python_module=False)

worst = 0.0
for dtype in torch.float16, torch.bfloat16:
    torch.manual_seed(1)
    x, residual = (torch.randn(8, 100, 4096, device="cuda").to(dtype) for _ in range(2))
    weight = torch.rand(4096, device="cuda").to(dtype)
    added, eps = (x.float() + residual.float()).to(dtype), 1e-5
    exact = added.double()
    expected = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        y = torch.ops.kernels_example.add_rmsnorm(x, residual, weight, eps)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(residual, added), f"{dtype}: the residual stream"
    error = (y.double() - expected).abs() / (expected.abs() + 1e-3) / torch.finfo(dtype).eps  # rounding alone makes 0.5
    worst = max(worst, error.max().item())
print(f"add_rmsnorm for sm_{gpu}: the largest error is {worst:.3f} units of the last place")
sys.exit(worst > 0.6)
