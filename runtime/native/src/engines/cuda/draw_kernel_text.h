// The text of engines/cuda/draw_kernel.h and of the files that it includes. CMake generates the
// definitions from draw_kernel_text.cc.in.
#pragma once

namespace dlm {

extern const char kGumbelText[], kRandomText[], kDrawsText[], kDrawKernelText[];

}  // namespace dlm
