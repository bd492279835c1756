// The TensorRT engine, which runs an engine file on the first CUDA device. The file must have been
// built with the same version of TensorRT as the loaded library.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/cuda/device_draws.h"
#include "engines/engine.h"
#include "engines/graph_check.h"
#include "engines/tensorrt/tensorrt_library.h"
#include "engines/tensorrt/tensorrt_profiles.h"

namespace dlm::trt {

// Returns the shape of a port in a pass of one request. The pass has `tokens` tokens, reads
// `cached` cached tokens, and scores `rows` rows.
nvinfer1::Dims dims_of(const Port& port, int32_t tokens, int32_t cached, int32_t rows);

class TensorRt final : public Engine {
 public:
  TensorRt(const GraphSpec& graph, const std::vector<EngineSpec>& engines,
           const std::string& library, const Log& log);
  ~TensorRt() override;
  TensorRt(const TensorRt&) = delete;
  TensorRt& operator=(const TensorRt&) = delete;

  std::unique_ptr<Context> open_context(int32_t longest) override;
  std::string description() const override;
  int32_t max_rows(int32_t tokens, int32_t cached) const override;
  // The exporter builds engines that accept only one request per pass.
  int32_t max_batch() const override { return 1; }
  std::string limits() const override { return limits_text(spec_); }
  bool keeps_conditioning() const override { return graph_.conditioning_size > 0; }
  bool draws() const override { return draw_kernel_.is_ready(); }

  const CudaDevice& device() const { return device_; }
  const Ports& ports() const { return ports_; }
  const GraphSpec& graph() const { return graph_; }
  const DrawKernel& draw_kernel() const { return draw_kernel_; }
  const EngineSpec& spec() const { return spec_; }

  // Returns how many bytes of device memory a pass with this profile needs for intermediate
  // results.
  size_t working_bytes(int32_t profile) const {
    return static_cast<size_t>(
        std::max<int64_t>(engine_->getDeviceMemorySizeForProfileV2(profile), 0));
  }

  // Creates an execution context. The caller must set the working memory and the profile of the
  // context. Any thread may call this function.
  std::unique_ptr<nvinfer1::IExecutionContext> create_context();

  // Throws an Error with status DLM_ENGINE_FAILED. The message contains the name of the failed call
  // and TensorRT's own message.
  [[noreturn]] void fail_call(const std::string& call);

  // Discards the errors that TensorRT has reported so far. Call this function after calls that
  // succeeded, so that the message of a later failure does not contain their errors.
  void forget_errors() { logger_.take(); }

 private:
  void verify_ports();
  void verify_profiles() const;

  // Members are destroyed from last to first. The device's context must outlive all objects that
  // were created in it.
  CudaDevice device_;
  const DrawKernel draw_kernel_;
  const GraphSpec graph_;
  const Library library_;
  const EngineSpec spec_;
  Ports ports_;
  Logger logger_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::mutex mutex_;  // guards engine_->createExecutionContext
};

// Opens a context, and allocates all the memory that its passes need. Throws an Error with status
// DLM_ENGINE_FAILED or DLM_OUT_OF_MEMORY.
std::unique_ptr<Context> open_session(TensorRt& engine);

}  // namespace dlm::trt
