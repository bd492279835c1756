// Functions that only the mock of CUDA has, and not the real libcuda. The mock of TensorRT and the
// test driver call them.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>

namespace mock {

// Counts a call. Returns true if $MOCK_CUDA_FAIL says that the call must fail. For example,
// "cuMemAlloc:2,enqueueV3:*" makes the second cuMemAlloc and every enqueueV3 fail.
bool note(const std::string& call);

// Returns the number of calls of each function so far, such as "cuInit=1 cuMemAlloc=2 ...". The
// text also contains two counts of errors: bad_access and stale_graph.
std::string counts();

// Returns the number of streams, graphs, memory blocks and retained contexts that were not freed.
int live();

// Returns a pointer through which the host can access device memory. If [address, address + bytes)
// is not inside one allocation, counts a bad_access and returns nullptr.
void* view(CUdeviceptr address, size_t bytes);

bool is_capturing(CUstream stream);

// Queues work on a stream. If the stream is being captured, records the work. Otherwise, the work
// runs when a caller waits for the stream.
void submit(CUstream stream, const std::function<void()>& work);

}  // namespace mock
