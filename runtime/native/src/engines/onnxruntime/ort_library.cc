#include "engines/onnxruntime/ort_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "base/dynamic_library.h"
#include "base/error.h"
#include "base/one_line.h"

namespace dlm {
namespace {

constexpr char kOrtAdvice[] =
    "Python finds pip's (onnxruntime). C programs find the system's (1.23 or later). For another, "
    "set engine_library of dlm_open_options or DLM_ONNXRUNTIME to the path of libonnxruntime.so "
    "(`dlm-export embed --engine` prints the path of pip's).";

constexpr char kOrtGpuAdvice[] =
    "Python finds pip's (onnxruntime-gpu). In C, set engine_library of dlm_open_options or "
    "DLM_ONNXRUNTIME to the path of its libonnxruntime.so.";

}  // namespace

OrtLibrary load_onnxruntime(const std::string& given, const ProviderChoice& provider) {
  // In the official builds, CreateEnv stores a device id and starts to send telemetry. This
  // variable prevents both (docs/Privacy.md of ONNX Runtime). If the program has already set the
  // variable, setenv does not change its value here.
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  // The file names to try: first the name in ONNX Runtime's releases, then the name that linkers
  // use. Debian's names, which contain the minor version, come last.
  std::vector<std::string> names = {"libonnxruntime.so.1", "libonnxruntime.so"};
  for (long minor = 40; minor >= long{ort::kOpsetVersion}; --minor)
    names.push_back("libonnxruntime.so.1." + std::to_string(minor));
  std::string name;
  void* const handle =
      open_library({"ONNX Runtime", "DLM_ONNXRUNTIME", std::move(names), kOrtAdvice}, given, &name);
  const auto get_base = reinterpret_cast<ort::GetApiBase>(dlsym(handle, "OrtGetApiBase"));
  if (get_base == nullptr)
    throw Error(DLM_ENGINE_MISSING,
                name + " is not ONNX Runtime: it has no OrtGetApiBase. " + kOrtAdvice);
  const ort::ApiBase* const base = get_base();
  // The version must be checked before get_api is called, because get_api prints an error to stderr
  // if the library is too old.
  const std::string version = one_line(base->get_version_string());
  char* point = nullptr;
  const long major = std::strtol(version.c_str(), &point, 10);
  const long minor = *point == '.' ? std::strtol(point + 1, nullptr, 10) : 0;
  const uint32_t least = provider.is_gpu() ? ort::kPlacementVersion : ort::kOpsetVersion;
  const bool is_new_enough = major > 1 || (major == 1 && minor >= long{least});
  const void* const table =
      is_new_enough ? base->get_api(provider.is_gpu() ? least : ort::kApiVersion) : nullptr;
  if (table == nullptr) {
    const std::string needed = "1." + std::to_string(least) + " or newer is needed";
    throw Error(
        DLM_ENGINE_MISSING,
        name + " is ONNX Runtime " + version + ", and " + needed +
            (provider.is_gpu() ? " for provider \"" + provider.name + "\"" : ", for opset 23") +
            ". " + (provider.is_gpu() ? kOrtGpuAdvice : kOrtAdvice));
  }
  return {ort::Api(table), version};
}

dlm_status load_failure(const ort::Api& api, const OrtStatus* reported) {
  const int code = reported != nullptr ? api.call<ort::GetErrorCode>(reported) : 0;
  if (code == ort::kNoSuchFile) return DLM_NOT_FOUND;
  const bool is_bad =
      code == ort::kNoModel || code == ort::kInvalidProtobuf || code == ort::kInvalidGraph;
  return is_bad ? DLM_BAD_BUNDLE : DLM_ENGINE_FAILED;
}

}  // namespace dlm
