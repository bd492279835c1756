// Stands for CUDA's header of this name, which TensorRT's headers include for two opaque types. The
// driver has the same types under other names (engines/cuda/cuda_api.h), so none of CUDA's headers
// are needed.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
