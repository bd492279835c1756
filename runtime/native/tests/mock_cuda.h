// Functions of the CUDA mock that libcuda does not have. The TensorRT mock and the tests' driver
// call them.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>

namespace mock {

// Counts a call. Returns true if the call should fail, as $MOCK_CUDA_FAIL says. For example,
// "cuMemAlloc:2,enqueueV3:*" makes the second cuMemAlloc fail, and every enqueueV3.
bool note(const std::string& call);

// The numbers of calls so far, such as "cuInit=1 cuMemAlloc=2 ...". Also has two counts of errors:
// bad_access and stale_graph.
std::string counts();

// The number of streams, graphs, memory blocks and retained contexts that were not freed.
int live();

// A pointer through which the host can access device memory. If [address, address + bytes) is not
// inside one allocation, returns nullptr and counts a bad_access.
void* view(CUdeviceptr address, size_t bytes);

bool is_capturing(CUstream stream);

// Queues work on a stream. If the stream is being captured, the work is recorded. Otherwise it is
// done when a caller waits for the stream.
void submit(CUstream stream, const std::function<void()>& work);

}  // namespace mock
