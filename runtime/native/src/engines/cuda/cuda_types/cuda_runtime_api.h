// A replacement for the CUDA header cuda_runtime_api.h. TensorRT's headers include
// cuda_runtime_api.h only for two opaque types. With this replacement, a build does not need CUDA's
// headers. engines/cuda/cuda_api.h declares the two types under different names.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
