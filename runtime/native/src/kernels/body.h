// The kernels of kernels/kernels.h, written once over `simd`; each instruction set's file includes
// this after its own vectors.
//
// Everything here has internal linkage and calls nothing of the standard library that could be
// shared with files compiled for lesser processors.
#pragma once

#include "kernels/attention.h"
#include "kernels/candidates.h"
#include "kernels/embedding.h"
#include "kernels/experts.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/nvfp4.h"
#include "kernels/tied_head.h"
