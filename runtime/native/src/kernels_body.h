// The kernels of kernels.h, written once over `simd`; each instruction set's file includes this after its own vectors.
//
// Everything here has internal linkage and calls nothing of the standard library that could be shared with files compiled
// for lesser processors.
#pragma once

#include "kernels_attention.h"
#include "kernels_candidates.h"
#include "kernels_embedding.h"
#include "kernels_experts.h"
#include "kernels_linear.h"
#include "kernels_nvfp4.h"
