// Loads TensorRT (libnvinfer or libnvinfer_lean) or TensorRT-RTX (libtensorrt_rtx) at run time, and
// collects the errors that the library reports.
//
// This code is compiled with the headers of one of these two libraries. The loaded library must
// have the same major version as the headers, because the code calls virtual functions of the
// library's C++ classes.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "engines/engine.h"

namespace dlm::trt {

#ifdef TRT_MAJOR_RTX  // only NvInferVersion.h of TensorRT-RTX defines it
constexpr char kBuilder[] = "tensorrt_rtx", kName[] = "TensorRT-RTX";
#else
constexpr char kBuilder[] = "tensorrt", kName[] = "TensorRT";
#endif

// Stores the first error that TensorRT reports, and passes all messages to the program's log.
// TensorRT may report messages from any thread.
class Logger final : public nvinfer1::ILogger {
 public:
  explicit Logger(const Log& log) : log_(log) {}
  void log(Severity severity, const char* message) noexcept override;

  // Returns ": " and the first error since the last call of take(), or "" if there was no error.
  // Callers append this text to their message.
  std::string take();

 private:
  const Log log_;
  std::mutex mutex_;
  std::string first_;
};

struct Library {
  void* (*create_runtime)(void* logger, int32_t version);
  std::string version;  // for example "10.14.1.48"
  bool is_lean;         // libnvinfer_lean, which only runs version-compatible engines
};

// Loads the library at the path `given`. If `given` is empty, searches for the library as described
// in dlm_runtime.h at dlm_open_options.engine_library. Throws an Error with status
// DLM_ENGINE_MISSING.
Library load_library(const std::string& given);

}  // namespace dlm::trt
