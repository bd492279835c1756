// A mock of libnvinfer_lean, which contains the runtime of TensorRT but not the builder.
#define MOCK_LEAN
#include "mock_nvinfer.cc"
