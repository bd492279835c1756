#include "engines/tensorrt/tensorrt_library.h"

#include <dlfcn.h>

#include <iterator>

#include "base/dynamic_library.h"
#include "base/error.h"
#include "base/one_line.h"

namespace dlm::trt {
namespace {

#define DLM_TEXT_OF(value) #value
#define DLM_TEXT(value) DLM_TEXT_OF(value)
#ifdef TRT_MAJOR_RTX
constexpr const char* kLibraries[] = {"libtensorrt_rtx.so." DLM_TEXT(NV_TENSORRT_MAJOR)};
constexpr char kAdvice[] =
    "Install it (pip: tensorrt-rtx-cu13-libs) and give its path, as engine_library or in "
    "DLM_TENSORRT, or open the bundle with engine \"onnxruntime\".";
#else
constexpr const char* kLibraries[] = {"libnvinfer.so." DLM_TEXT(NV_TENSORRT_MAJOR),
                                      "libnvinfer_lean.so." DLM_TEXT(NV_TENSORRT_MAJOR)};
constexpr char kAdvice[] =
    "A Jetson's comes with JetPack; of any other (pip: tensorrt, or tensorrt-lean-cu13-libs for "
    "version-compatible engines) give the path, as engine_library or in DLM_TENSORRT. Or open the "
    "bundle with engine \"onnxruntime\".";
#endif

}  // namespace

void Logger::log(Severity severity, const char* message) noexcept {
  // TensorRT counts from internal errors (0) to verbose messages (4).
  const int32_t level = DLM_LOG_FATAL - static_cast<int32_t>(severity);
  if (log_.on_log != nullptr && level >= log_.severity) log_.write(level, message);
  if (severity > Severity::kERROR) return;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first_.empty()) first_ = one_line(message);
    // If there is no memory for TensorRT's message, the caller reports the error without this
    // message.
  } catch (...) {
  }
}

std::string Logger::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string said = first_.empty() ? "" : ": " + first_;
  first_.clear();
  return said;
}

Library load_library(const std::string& given) {
  std::string name;
  void* const handle =
      open_library({kName, "DLM_TENSORRT", {std::begin(kLibraries), std::end(kLibraries)}, kAdvice},
                   given, &name);
  const auto ask = [&](const char* what) {
    const auto function = reinterpret_cast<int32_t (*)()>(dlsym(handle, what));
    if (function == nullptr)
      throw Error(DLM_ENGINE_MISSING,
                  name + " is not " + kName + ": it has no " + what + ". " + kAdvice);
    return function();
  };
  const int32_t major = ask("getInferLibMajorVersion");
  std::string version = std::to_string(major);
  for (const char* const part :
       {"getInferLibMinorVersion", "getInferLibPatchVersion", "getInferLibBuildVersion"})
    version += "." + std::to_string(ask(part));
  if (major != NV_TENSORRT_MAJOR)
    throw Error(DLM_ENGINE_MISSING,
                name + " is TensorRT " + version + ", but this build of libdlm_runtime is for " +
                    kName + " " + DLM_TEXT(NV_TENSORRT_MAJOR) +
                    ": compile it with that library's headers, or give another. " + kAdvice);
  const auto create =
      reinterpret_cast<void* (*)(void*, int32_t)>(dlsym(handle, "createInferRuntime_INTERNAL"));
  if (create == nullptr)
    throw Error(DLM_ENGINE_MISSING,
                name + " is not " + kName + ": it has no createInferRuntime_INTERNAL. " + kAdvice);
  return {create, version, dlsym(handle, "createInferBuilder_INTERNAL") == nullptr};
}

}  // namespace dlm::trt
