#include "engines/onnxruntime/ort_provider.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/dynamic_library.h"
#include "base/error.h"
#include "base/sha256.h"
#include "engines/onnxruntime/ort_handles.h"

namespace dlm {
namespace {

constexpr Provider kProviders[] = {
    {"cuda", "CUDAExecutionProvider", "CUDA"},
    {"tensorrt", "TensorrtExecutionProvider", "TensorRT"},
    {"nv_tensorrt_rtx", "NvTensorRTRTXExecutionProvider", "TensorRT-RTX"},
};
constexpr char kFromWheel[] =
    "Run `pip uninstall onnxruntime onnxruntime-gpu`, then `pip install onnxruntime-gpu` (Linux on "
    "x86-64), or set DLM_ONNXRUNTIME to a library that has it.";
constexpr char kFromPlugin[] =
    "Run `pip install onnxruntime-ep-nv-tensorrt-rtx-cu13` (or -cu12, for a driver of CUDA 12), or "
    "set provider_library of dlm_open_options or DLM_TENSORRT_RTX_PROVIDER to its path, and name "
    "the folder of libtensorrt_rtx.so.1 in LD_LIBRARY_PATH.";
constexpr char kLibraries[] =
    "It needs CUDA's and cuDNN's libraries (provider \"tensorrt\" also TensorRT's) of the major "
    "versions that it was built with: `pip install 'onnxruntime-gpu[cuda,cudnn]'`, or name their "
    "folders in LD_LIBRARY_PATH.";
// The exporter gives names with this prefix to nodes that only compute sizes of tensors. ONNX
// Runtime runs such nodes on the CPU, even if the provider has kernels for them.
constexpr char kSizes[] = "sizes/";
// A message lists at most this many operators, and at most this many node names per operator.
constexpr size_t kMostOperators = 8, kMostNames = 3;

bool is(const Provider& provider, const char* name) {
  return std::strcmp(provider.name, name) == 0;
}

bool is_plugin(const Provider& provider) { return is(provider, "nv_tensorrt_rtx"); }

// If ONNX Runtime could not load a provider, throws an error with ONNX Runtime's message, but
// without the place in ONNX Runtime's source code.
void check_added(const ort::Api& api, OrtStatus* reported, const Provider& provider) {
  if (reported == nullptr) return;
  const std::string whole = api.call<ort::GetErrorMessage>(reported);
  api.call<ort::ReleaseStatus>(reported);
  std::string first = whole.substr(0, whole.find('\n'));
  const std::string mark = "[ONNXRuntimeError] : ";
  if (const size_t place = first.find(mark); place != std::string::npos)
    first.erase(0, place + mark.size());
  throw Error(DLM_ENGINE_MISSING, std::string("ONNX Runtime's ") + provider.label +
                                      " provider: " + one_line(first) + ". " +
                                      (is_plugin(provider) ? kFromPlugin : kLibraries));
}

using Options = std::vector<std::pair<const char*, std::string>>;

template <class Create, class Update, class Append, class Release, class Object>
void add(const ort::Api& api, const Provider& provider, const Options& given,
         OrtSessionOptions* options) {
  std::vector<const char*> keys, values;
  for (const auto& [key, value] : given) keys.push_back(key), values.push_back(value.c_str());
  Owned<Object, Release> made(api);
  check_added(api, api.call<Create>(made.out()), provider);
  check_added(api, api.call<Update>(made.get(), keys.data(), values.data(), keys.size()), provider);
  check_added(api, api.call<Append>(options, static_cast<const Object*>(made.get())), provider);
}

void add_cuda(const ort::Api& api, const ProviderChoice& choice, OrtSessionOptions* options) {
  // Without use_tf32 = 0, CUDA would round fp32 to TensorFloat-32, which has only ten bits of
  // fraction. With kSameAsRequested, the memory arena grows only by the amount that a pass needs.
  const Options given = {{"device_id", std::to_string(choice.device)},
                         {"use_tf32", "0"},
                         {"arena_extend_strategy", "kSameAsRequested"},
                         {"enable_cuda_graph", choice.cuda_graphs ? "1" : "0"}};
  // Without this key, MatMulNBits converts the whole matrix to fp16 in each pass. Versions of ONNX
  // Runtime without the kernels ignore the key.
  check(api, api.call<ort::AddSessionConfigEntry>(options, "ep.cuda.fpa_intb_gemm", "1"),
        "setting up ONNX Runtime");
  add<ort::CreateCudaProviderOptions, ort::UpdateCudaProviderOptions, ort::AppendCudaProvider,
      ort::ReleaseCudaProviderOptions, OrtCUDAProviderOptionsV2>(api, kProviders[0], given,
                                                                 options);
}

// Returns the devices that the provider can use. The list is empty until the provider's library has
// been registered.
std::vector<const OrtEpDevice*> devices_of(const ort::Api& api, const OrtEnv* env,
                                           const Provider& provider) {
  const OrtEpDevice* const* all = nullptr;
  size_t count = 0;
  check(api, api.call<ort::GetProviderDevices>(env, &all, &count),
        "listing ONNX Runtime's devices");
  std::vector<const OrtEpDevice*> found;
  for (size_t i = 0; i < count; ++i)
    if (std::strcmp(api.call<ort::ProviderDeviceGetProvider>(all[i]), provider.registered) == 0)
      found.push_back(all[i]);
  return found;
}

// Returns the path of a loaded library. ONNX Runtime would look for a name, or for a relative path,
// in its own folder.
std::string absolute_path(void* library) {
  const link_map* map = nullptr;
  dlinfo(library, RTLD_DI_LINKMAP, &map);
  const std::unique_ptr<char, decltype(&std::free)> path(realpath(map->l_name, nullptr), std::free);
  return path == nullptr ? map->l_name : path.get();
}

// Creates a folder, unless it exists. Returns false if this user cannot write in the folder, or if
// other users can.
bool is_private_folder(const std::string& path) {
  struct stat found{};
  mkdir(path.c_str(), 0700);
  return stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == geteuid() &&
         (found.st_mode & (S_IWGRP | S_IWOTH)) == 0 && access(path.c_str(), W_OK) == 0;
}

// Returns the folder in which TensorRT-RTX keeps the kernels that it compiles for a graph. Returns
// "" if there is no folder that is safe: TensorRT-RTX runs the kernels that it finds, and checks
// only that they were compiled for this GPU, and not by a newer version of TensorRT-RTX or CUDA.
std::string kernel_cache(const std::string& graph, const char* provider_version) {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  std::string folder;
  if (cache != nullptr && cache[0] == '/')
    folder = cache;
  else if (home != nullptr && home[0] == '/')
    folder = std::string(home) + "/.cache";
  const std::string version = provider_version == nullptr ? "" : provider_version;
  const std::string name = sha256_hex(sha256_file_hex(graph) + version);
  for (const std::string& part : {std::string(), std::string("/dlm-export"), "/" + name})
    if (!is_private_folder(folder += part)) return "";
  return folder;
}

// ONNX Runtime and CUDA may list devices in different orders, so devices are compared by their
// addresses on the PCI bus.
void add_plugin(const ort::Api& api, const Provider& provider, const ProviderChoice& choice,
                const CudaDevice& device, const std::string& graph, OrtEnv* env,
                OrtSessionOptions* options) {
  static std::mutex registering;  // ONNX Runtime refuses a second registration
  const std::lock_guard<std::mutex> lock(registering);
  std::vector<const OrtEpDevice*> devices = devices_of(api, env, provider);
  const bool is_new = devices.empty();
  if (is_new) {
    std::string name;
    void* const library = open_library({"ONNX Runtime's TensorRT-RTX provider",
                                        "DLM_TENSORRT_RTX_PROVIDER",
                                        {"libonnxruntime_providers_nv_tensorrt_rtx.so"},
                                        kFromPlugin},
                                       choice.library, &name);
    check_added(api,
                api.call<ort::RegisterProviderLibrary>(env, provider.registered,
                                                       absolute_path(library).c_str()),
                provider);
    devices = devices_of(api, env, provider);
  }
  for (const OrtEpDevice* const each : devices) {
    const OrtHardwareDevice* const hardware = api.call<ort::ProviderDeviceGetHardware>(each);
    const char* const address =
        api.call<ort::GetKeyValue>(api.call<ort::HardwareGetMetadata>(hardware), "pci_bus_id");
    // Some systems do not report the address. Then the device must be the only one.
    if (address == nullptr ? devices.size() > 1 : !device.is_at(address)) continue;
    const auto* const metadata = api.call<ort::ProviderDeviceGetMetadata>(each);
    const std::string cache = kernel_cache(graph, api.call<ort::GetKeyValue>(metadata, "version"));
    const char *const key = "nv_runtime_cache_path", *const value = cache.c_str();
    return check_added(api,
                       api.call<ort::AppendProviderDevices>(options, env, &each, size_t{1}, &key,
                                                            &value, size_t{1}),
                       provider);
  }
  // Without this call, the next attempt could not register the library.
  if (is_new)
    check(api, api.call<ort::UnregisterProviderLibrary>(env, provider.registered),
          "removing ONNX Runtime's TensorRT-RTX provider");
  throw Error(DLM_UNSUPPORTED, std::string("ONNX Runtime's ") + provider.label +
                                   " provider does not list the device " +
                                   std::to_string(choice.device) + " (" + device.name() + ", SM " +
                                   sm_text(device.sm()) +
                                   "). It runs on RTX GPUs of SM 8.6, 8.9 and from 12.0 on, which "
                                   "must be visible in /sys/class/drm.");
}

}  // namespace

const Provider* find_provider(const std::string& name) {
  std::string all = "cpu";
  if (name == all) return nullptr;
  for (const Provider& provider : kProviders) {
    if (name == provider.name) return &provider;
    all += std::string(", ") + provider.name;
  }
  fail(DLM_UNSUPPORTED, "provider \"%.40s\" is not one of: %s", name.c_str(), all.c_str());
}

void check_provider_there(const ort::Api& api, const std::string& version,
                          const Provider& provider) {
  if (is_plugin(provider)) return;
  char** names = nullptr;
  int count = 0;
  check(api, api.call<ort::GetAvailableProviders>(&names, &count),
        "listing ONNX Runtime's providers");
  bool is_there = false;
  std::string all;
  for (int i = 0; i < count; ++i) {
    is_there = is_there || std::strcmp(names[i], provider.registered) == 0;
    all += (i == 0 ? "" : ", ") + one_line(names[i]);
  }
  check(api, api.call<ort::ReleaseAvailableProviders>(names, count),
        "listing ONNX Runtime's providers");
  if (is_there) return;
  throw Error(DLM_ENGINE_MISSING, "this ONNX Runtime " + version + " has no " +
                                      provider.registered + ", only " + all + ". " + kFromWheel);
}

void add_provider(const ort::Api& api, const Provider& provider, const ProviderChoice& choice,
                  const CudaDevice& device, const std::string& graph, OrtEnv* env,
                  OrtSessionOptions* options) {
  if (is_plugin(provider)) return add_plugin(api, provider, choice, device, graph, env, options);
  if (is(provider, "cuda")) return add_cuda(api, choice, options);
  const Options given = {{"device_id", std::to_string(choice.device)}};
  add<ort::CreateTensorRtProviderOptions, ort::UpdateTensorRtProviderOptions,
      ort::AppendTensorRtProvider, ort::ReleaseTensorRtProviderOptions,
      OrtTensorRTProviderOptionsV2>(api, provider, given, options);
  if (choice.allow_fallback) add_cuda(api, choice, options);
}

std::string left_behind(const ort::Api& api, const OrtSession* session, const Provider& provider) {
  const auto ask = [&](OrtStatus* reported) {
    check(api, reported, "reading which provider runs which node");
  };
  const auto text = [&](auto entry, const auto* object) {
    const char* out = nullptr;
    ask(api.call<decltype(entry)>(object, &out));
    return one_line(out == nullptr ? "" : out);
  };
  const OrtEpAssignedSubgraph* const* parts = nullptr;
  size_t part_count = 0, all = 0, left = 0;
  std::map<std::string, std::vector<std::string>> names;  // names of nodes, by operator
  ask(api.call<ort::GetPlacement>(session, &parts, &part_count));
  for (size_t i = 0; i < part_count; ++i) {
    const OrtEpAssignedNode* const* nodes = nullptr;
    size_t count = 0;
    ask(api.call<ort::PlacementGetNodes>(parts[i], &nodes, &count));
    all += count;
    if (text(ort::PlacementGetProvider{}, parts[i]) == provider.registered) continue;
    for (size_t j = 0; j < count; ++j) {
      const std::string name = text(ort::PlacedNodeGetName{}, nodes[j]);
      if (name.rfind(kSizes, 0) == 0) continue;
      ++left;
      const std::string domain = text(ort::PlacedNodeGetDomain{}, nodes[j]);
      const std::string prefix = domain.empty() || domain == "ai.onnx" ? "" : domain + ".";
      names[prefix + text(ort::PlacedNodeGetOperator{}, nodes[j])].push_back(name);
    }
  }
  if (left == 0) return "";
  std::vector<std::pair<std::string, std::vector<std::string>>> most(names.begin(), names.end());
  std::stable_sort(most.begin(), most.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  std::string list = std::to_string(left) + " of " + std::to_string(all) + " nodes:";
  for (size_t i = 0; i < most.size() && i < kMostOperators; ++i) {
    const auto& [op, nodes] = most[i];
    list += (i == 0 ? " " : ", ") + std::to_string(nodes.size()) + " " + op + " (";
    for (size_t j = 0; j < nodes.size() && j < kMostNames; ++j)
      list += (j == 0 ? "" : ", ") + nodes[j];
    list += nodes.size() > kMostNames ? ", ...)" : ")";
  }
  return list + (most.size() > kMostOperators ? ", and others" : "");
}

}  // namespace dlm
