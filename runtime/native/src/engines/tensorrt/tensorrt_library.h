// libnvinfer or libtensorrt_rtx, loaded at run time: its name, its version, and its errors.
//
// Compiled with the headers of either TensorRT or TensorRT-RTX. The library must have the same
// major version, because its C++ classes are called through their virtual tables.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace dlm::trt {

#ifdef TRT_MAJOR_RTX  // only TensorRT-RTX's NvInferVersion.h has it
constexpr char kBuilder[] = "tensorrt_rtx", kName[] = "TensorRT-RTX";
#else
constexpr char kBuilder[] = "tensorrt", kName[] = "TensorRT";
#endif

// Keeps the first error that TensorRT reports; prints nothing. Any thread may report.
class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override;

  // The first error since the last call, as the end of a sentence.
  std::string take();

 private:
  std::mutex mutex_;
  std::string first_;
};

struct Library {
  void* (*create_runtime)(void* logger, int32_t version);
  std::string version;  // "10.14.1.48"
};

// Opens `given`, or the places that dlm_open_options lists. Throws Error(DLM_ENGINE_MISSING).
Library load_library(const std::string& given);

}  // namespace dlm::trt
