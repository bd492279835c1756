// Replaces CUDA's header of this name, which TensorRT's headers include for two opaque types, so
// that CUDA's headers are not needed. engines/cuda/cuda_api.h has them under other names.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
