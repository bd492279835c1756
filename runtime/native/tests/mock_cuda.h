// What the mock of TensorRT and the driver of the tests want of the mock of CUDA, beside CUDA's own
// calls.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>

namespace mock {

// Counts a call; true if it shall fail, as $MOCK_CUDA_FAIL says: "cuMemAlloc:2,enqueueV3:*" is the
// second and all.
bool note(const std::string& call);

// "cuInit=1 cuMemAlloc=2 ...": calls so far, and what must never happen: bad_access, stale_graph.
std::string counts();

// Streams, graphs, memory and retained contexts that nobody has given back.
int live();

// The host's view of device memory, or nullptr and a bad_access if [address, address + bytes) is
// not inside one allocation.
void* view(CUdeviceptr address, size_t bytes);

bool is_capturing(CUstream stream);

// Work on a stream: recorded while it captures, else done when somebody waits for the stream, and
// no sooner.
void submit(CUstream stream, const std::function<void()>& work);

}  // namespace mock
