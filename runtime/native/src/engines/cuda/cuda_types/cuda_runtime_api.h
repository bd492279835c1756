// A replacement for the CUDA header of this name. TensorRT's headers include that header only for
// two opaque types. With this file, CUDA's headers are not needed. engines/cuda/cuda_api.h declares
// the same types under other names.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
