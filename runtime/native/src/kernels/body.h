// Defines all kernels of kernels/kernels.h. The kernels are written once, with the vector
// operations of the namespace `simd`. Each instruction set has a header that defines these
// operations. Each instruction set also has a source file, which includes the header of the
// instruction set and then this file.
//
// All functions in this file have internal linkage, and call no function of the standard library.
// Otherwise, the linker would keep only one of several copies of a function. Then the kernels for
// an older processor could call a copy that was compiled for a newer processor.
#pragma once

#include "kernels/attention.h"
#include "kernels/candidates.h"
#include "kernels/embedding.h"
#include "kernels/experts.h"
#include "kernels/linear.h"
#include "kernels/low_rank.h"
#include "kernels/norm.h"
#include "kernels/nvfp4.h"
#include "kernels/tied_head.h"

namespace {

constexpr dlm::Kernels make_kernels(const char* name,
                                    decltype(dlm::Kernels::attention) attend = attention) {
  return {name,     linear,     nvfp4_linear, experts,   attend,
          add_norm, candidates, embedding,    tied_head, low_rank_updates};
}

}  // namespace
