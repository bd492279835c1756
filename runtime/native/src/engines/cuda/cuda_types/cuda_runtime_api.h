// A replacement for the CUDA header cuda_runtime_api.h, so that a build does not need CUDA's
// headers. TensorRT's headers include cuda_runtime_api.h only for two opaque types.
// engines/cuda/cuda_api.h declares these types under other names.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
