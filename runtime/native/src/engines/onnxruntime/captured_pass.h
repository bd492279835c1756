// The arrays of passes that ONNX Runtime's CUDA provider captures as CUDA graphs.
//
// A CUDA graph repeats the kernels of one pass, with one call of the driver. It reads and writes
// the same addresses each time. So all passes of one shape use the same arrays in device memory.
// Inputs are copied to these arrays before each pass, and outputs are copied back after it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "dlm_runtime.h"
#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"
#include "engines/onnxruntime/row_choice.h"

namespace dlm {

class CapturedPass {
 public:
  // `pass` and `rows` give the sizes of the arrays. The device must outlive this object, and its
  // context must be current in all calls, also when the object is destroyed. `id`
  // identifies the CUDA graph in the session. Throws the same errors as Cuda::check.
  CapturedPass(const CudaDevice& device, const dlm_pass& pass, const RowChoice& rows, int32_t top_k,
               int id);
  CapturedPass(const CapturedPass&) = delete;
  CapturedPass& operator=(const CapturedPass&) = delete;

  int id() const { return id_; }

  // Copies the inputs of a pass to the device. `pass.score_rows` may have fewer rows than the
  // arrays. The rest is filled with row 0.
  void upload(const dlm_pass& pass, const RowChoice& rows);
  // Returns the same pass with the addresses and sizes of the arrays on the device.
  Pass on_device(const Pass& pass) const;
  // Returns the address of the first number of each list of the RowChoice on the device.
  const void* device_list(int number) const { return address(kRows + number); }
  // Copies the outputs of the pass to the caller's arrays.
  void download(const dlm_pass& pass);

 private:
  enum Part {
    kIds,
    kPositions,
    kScoreRows,
    kRows,
    kRequests,
    kOfTokens,
    kTokens,
    kProbs,
    kLogOdds,
    kEntropy,
    kEnd
  };

  void* address(int part) const {
    return reinterpret_cast<void*>(device_memory_.device(offsets_[part]));
  }

  const CudaDevice& device_;
  const int32_t rows_, top_k_;
  const int id_;
  const std::vector<size_t> offsets_;
  CudaMemory device_memory_, host_memory_;
  CudaStream stream_;
};

// The captured passes of a session, by their shapes.
class CapturedPasses {
 public:
  CapturedPasses(const CudaDevice& device, const GraphSpec& graph)
      : device_(device), graph_(graph) {}

  // Returns the captured pass for a pass of this shape. Rounds up the numbers of scored rows and of
  // cached rows, so that there are few shapes. Returns NULL if there are already as many captured
  // passes as possible.
  CapturedPass* find(dlm_pass& pass, RowChoice& rows);

 private:
  // Passes with equal shapes can use the same CUDA graph. The numbers contain the sizes of all
  // arrays, and the addresses of the keys and values.
  using PassShape = std::vector<uint64_t>;

  const CudaDevice& device_;
  const GraphSpec& graph_;
  std::map<PassShape, CapturedPass> passes_;
};

}  // namespace dlm
