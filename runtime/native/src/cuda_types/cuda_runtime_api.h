// Stands for CUDA's header of this name, which TensorRT's headers include for two opaque types. The driver's API has the same
// types under other names, so the CUDA runtime's headers, spread over several packages, are not needed.
#pragma once

#include <cuda.h>

typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
