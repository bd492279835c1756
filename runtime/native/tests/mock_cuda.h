// The extra functions of the mock of CUDA, for the mock of TensorRT and the tests' driver.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>

namespace mock {

// Counts a call. Returns true if $MOCK_CUDA_FAIL makes it fail: "cuMemAlloc:2,enqueueV3:*" means
// the second one and all.
bool note(const std::string& call);

// "cuInit=1 cuMemAlloc=2 ...": the calls so far, and errors: bad_access, stale_graph.
std::string counts();

// The number of streams, graphs, memory blocks and retained contexts that were not freed.
int live();

// The host's view of device memory. Returns nullptr, and counts a bad_access, if [address, address
// + bytes) is not inside one allocation.
void* view(CUdeviceptr address, size_t bytes);

bool is_capturing(CUstream stream);

// Queues work on a stream: recorded while it captures, otherwise done only when a caller waits for
// the stream.
void submit(CUstream stream, const std::function<void()>& work);

}  // namespace mock
