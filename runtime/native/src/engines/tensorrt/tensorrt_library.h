// libnvinfer or libtensorrt_rtx, opened at run time: its name, its version, and what it reports.
//
// Compiled with the headers of TensorRT or of TensorRT-RTX, whichever are given; the library must
// be of their major version, as its C++ classes are called through their tables of functions.
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

// Keeps the first error that TensorRT reports; nothing is printed. Any thread may report.
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

// Opens `given`, or where dlm_open_options says. Throws Error(DLM_ENGINE_MISSING).
Library load_library(const std::string& given);

}  // namespace dlm::trt
