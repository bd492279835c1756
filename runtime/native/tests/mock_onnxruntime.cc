// A mock of libonnxruntime with GPU providers. It implements the OrtApi slots that the engine
// calls, and runs the denoiser of mock_denoiser.h. A GPU provider computes in the device memory of
// mock_cuda, which the host cannot read.
//
// A graph for this mock is a text with these lines. Types are numbers of ONNXTensorElementDataType.
//   mock-graph
//   denoiser VOCAB MASK TOP_K CACHE_TYPE
//   layer KV_HEADS HEAD_SIZE                  (once per layer)
//   conditioning C                            (only if the denoiser has self-conditioning)
//   chooses_rows                              (only if passes choose cached rows)
//   candidates N                              (only if tokens from N on are never candidates)
//   node NAME OPERATOR [PROVIDER ...]         (DOMAIN:OPERATOR for other domains; the CPU runs all)
// For an invalid graph, the text may also have the line "nan".
//
// $MOCK_ORT_VERSION is the version that the mock reports (default 1.31.1). $MOCK_ORT_PROVIDERS
// lists the providers (default: TensorRT, CUDA, CPU). $MOCK_ORT_LIBRARIES lists the libraries that
// a provider cannot load. If $MOCK_ORT_NO_BUS is set, devices have no addresses. $MOCK_ORT_FULL is
// the call that fails because the device is full, for example "Run:2". $MOCK_CUDA_FAIL lists the
// calls that fail. $MOCK_RTX_VERSION is the version of the provider in a separate library. This
// provider writes a file "kernels" to its folder nv_runtime_cache_path.
//
// The mock is stricter than ONNX Runtime. Keys and values must be complete and on the provider's
// device, and all other arrays except the logits must be in host memory. If a pass has a CUDA
// graph, all arrays must be on the device, and must have the addresses and sizes that they had when
// the graph was captured. If work is still queued on the engine's streams when a pass starts, the
// pass does not see the results of this work.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engines/onnxruntime/ort_api.h"
#include "mock_cuda.h"
#include "mock_denoiser.h"

using namespace dlm;

struct OrtStatus {
  int code;
  std::string message;
};
struct OrtEnv {};
struct OrtKeyValuePairs {
  std::map<std::string, std::string> values;
};
struct OrtHardwareDevice {
  OrtKeyValuePairs metadata;
};
struct OrtEpDevice {
  std::string provider;
  int device;
  OrtHardwareDevice hardware;
  OrtKeyValuePairs metadata{};
};
struct OrtMemoryInfo {
  std::string name;
  int device;
};
struct OrtCUDAProviderOptionsV2 {
  std::map<std::string, std::string> given;
};
struct OrtTensorRTProviderOptionsV2 {
  std::map<std::string, std::string> given;
};
struct OrtCustomOpDomain {};
struct OrtRunOptions {
  std::map<std::string, std::string> entries;
};
struct OrtSessionOptions {
  std::vector<std::string> providers;
  int device = 0;
  bool has_graphs = false;
  std::map<std::string, std::string> entries;
};
struct OrtTensorTypeAndShapeInfo {
  int type;
  std::vector<int64_t> dims;
};
struct OrtTypeInfo {
  OrtTensorTypeAndShapeInfo tensor;
};
struct OrtValue {
  OrtMemoryInfo where;
  void* data;
  size_t bytes;
  int type;
  std::vector<int64_t> shape;
};
struct OrtEpAssignedNode {
  std::string name, domain, op;
};
struct OrtEpAssignedSubgraph {
  std::string provider;
  std::vector<OrtEpAssignedNode> nodes;
  std::vector<const OrtEpAssignedNode*> pointers;
};
struct OrtSession {
  mock::Shape shape{};
  int cache_type = 0;
  bool is_nan = false, is_recorded = false, chooses_rows = false, has_graphs = false;
  // For each CUDA graph, the address and size of each array.
  std::map<std::string, std::map<std::string, std::pair<void*, size_t>>> graphs;
  std::string provider;  // the provider that runs the denoiser
  int device = 0;
  std::vector<std::pair<std::string, OrtTypeInfo>> inputs, outputs;
  std::vector<OrtEpAssignedSubgraph> placement;
  std::vector<const OrtEpAssignedSubgraph*> pointers;
};

namespace {

constexpr char kCpu[] = "CPUExecutionProvider";
constexpr int kFail = 1, kFloat = 1, kInt32 = 6, kInt64 = 7;
constexpr int64_t kAny = -1;

std::string variable(const char* name, const char* fallback) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : fallback;
}

OrtStatus* refuse(const std::string& message, int code = kFail) {
  return new OrtStatus{code, message};
}

// Counts the call. Returns an error status if $MOCK_ORT_FULL or $MOCK_CUDA_FAIL selects this call.
OrtStatus* noted(const std::string& call) {
  static std::map<std::string, int> made;  // static, because tests let one of the driver's threads
                                           // fail at a time
  const bool is_failing = mock::note(call);
  if (variable("MOCK_ORT_FULL", "") == call + ":" + std::to_string(++made[call]))
    return refuse(
        "/onnxruntime_src/bfc_arena.cc:376 void* AllocateRawInternal() Failed to allocate memory "
        "for requested buffer of size 99");
  return is_failing ? refuse("the kernel is bad\nsecond line") : nullptr;
}

size_t element_bytes(int type) {
  return type == kInt64 ? 8 : type == kFloat || type == kInt32 ? 4 : 2;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

OrtStatus* read_graph(const std::string& path, const OrtSessionOptions& options,
                      OrtSession* session) {
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return refuse("no such file", ort::kNoSuchFile);
  std::string text(1 << 20, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  std::istringstream in(text);
  std::string line, word;
  if (!std::getline(in, line) || line != "mock-graph")
    return refuse("Protobuf parsing failed.", ort::kInvalidProtobuf);
  while (std::getline(in, line)) {
    std::istringstream words(line);
    words >> word;
    if (word == "denoiser") {
      words >> session->shape.vocab >> session->shape.mask >> session->shape.top_k >>
          session->cache_type;
    } else if (word == "layer") {
      int32_t kv_heads = 0, head_size = 0;
      words >> kv_heads >> head_size;
      session->shape.layers.push_back(
          {kv_heads, head_size * static_cast<int32_t>(element_bytes(session->cache_type))});
    } else if (word == "conditioning") {
      words >> session->shape.conditioning;
    } else if (word == "candidates") {
      words >> session->shape.candidates;
    } else if (word == "chooses_rows") {
      session->chooses_rows = true;
    } else if (word == "nan") {
      session->is_nan = true;
    } else if (word == "node") {
      std::string name, op, provider;
      std::set<std::string> able = {kCpu};
      words >> name >> op;
      while (words >> provider) able.insert(provider);
      OrtEpAssignedSubgraph part;
      for (const std::string& choice : options.providers)
        if (part.provider.empty() && able.count(choice) != 0) part.provider = choice;
      if (part.provider.empty()) part.provider = kCpu;
      const size_t colon = op.find(':');
      part.nodes.push_back(colon == std::string::npos ? OrtEpAssignedNode{name, "", op}
                                                      : OrtEpAssignedNode{name, op.substr(0, colon),
                                                                          op.substr(colon + 1)});
      session->placement.push_back(std::move(part));
    }
  }
  const auto port = [](auto& ports, const std::string& name, int type, std::vector<int64_t> dims) {
    ports.push_back({name, {{type, std::move(dims)}}});
  };
  auto &inputs = session->inputs, &outputs = session->outputs;
  for (const char* const name : {"input_ids", "position_ids", "score_rows"})
    port(inputs, name, kInt64, {kAny, kAny});
  port(outputs, "top_token", kInt32, {kAny, kAny, session->shape.top_k});
  port(outputs, "top_prob", kFloat, {kAny, kAny, session->shape.top_k});
  port(outputs, "top_log_odds", kFloat, {kAny, kAny, session->shape.top_k});
  port(outputs, "entropy", kFloat, {kAny, kAny});
  port(outputs, "logits", kFloat, {kAny, kAny, session->shape.vocab});
  for (size_t i = 0; i < session->shape.layers.size(); ++i) {
    const mock::Layer& layer = session->shape.layers[i];
    const int64_t head_size =
        layer.row_bytes / static_cast<int64_t>(element_bytes(session->cache_type));
    for (const char* const what : {"key.", "value."}) {
      port(inputs, "past_" + (what + std::to_string(i)), session->cache_type,
           {kAny, layer.kv_heads, kAny, head_size});
      port(outputs, "present_" + (what + std::to_string(i)), session->cache_type,
           {kAny, layer.kv_heads, kAny, head_size});
    }
  }
  if (const int64_t width = session->shape.conditioning; width > 0) {
    port(inputs, "conditioning", kFloat, {kAny, kAny, width});
    port(inputs, "temperature", kFloat, {kAny, kAny});
    port(outputs, "next_conditioning", kFloat, {kAny, kAny, width});
  }
  if (session->chooses_rows)
    for (const char* const name : {"cached_rows", "cached_requests", "token_requests"})
      port(inputs, name, kInt64, {kAny});
  for (OrtEpAssignedSubgraph& part : session->placement) {
    for (const OrtEpAssignedNode& node : part.nodes) part.pointers.push_back(&node);
    session->pointers.push_back(&part);
  }
  return nullptr;
}

OrtStatus* create_session(const OrtEnv*, const char* path, const OrtSessionOptions* options,
                          OrtSession** out) {
  if (OrtStatus* const failure = noted("CreateSession")) return failure;
  auto session = std::make_unique<OrtSession>();
  const auto is_set = [&](const char* key) {
    const auto found = options->entries.find(key);
    return found != options->entries.end() && found->second == "1";
  };
  session->is_recorded = is_set("session.record_ep_graph_assignment_info");
  session->provider = options->providers.empty() ? kCpu : options->providers.front();
  session->device = options->device;
  session->has_graphs = options->has_graphs;
  if (session->provider == "CUDAExecutionProvider" && !is_set("ep.cuda.fpa_intb_gemm"))
    return refuse("fast kernels for MatMulNBits are off");
  if (OrtStatus* const failure = read_graph(path, *options, session.get())) return failure;
  *out = session.release();
  return nullptr;
}

// Returns a pointer to a value's bytes in the provider's memory. If the value is in the wrong
// memory, counts an error and returns nullptr.
void* view(const OrtSession& session, const OrtValue& value, bool is_on_device) {
  const bool on_device = is_on_device && session.provider != kCpu;
  const bool is_there = on_device
                            ? value.where.name == "Cuda" && value.where.device == session.device
                            : value.where.name == "Cpu";
  if (!is_there) {
    mock::note("bad_access");
    return nullptr;
  }
  if (!on_device) return value.data;
  static unsigned char nothing;
  return value.bytes == 0 ? &nothing
                          : mock::view(reinterpret_cast<CUdeviceptr>(value.data), value.bytes);
}

// Computes the requests of a pass whose graph chooses cached rows, one after the other. `pass`
// contains the arrays of all requests.
void denoise_requests(const mock::Shape& shape, const mock::Pass& pass, const int64_t* rows,
                      const int64_t* requests, int64_t row_count, const int64_t* of_tokens) {
  const auto indices = [](const int64_t* of, int64_t count, int64_t request) {
    std::vector<int64_t> found;
    for (int64_t i = 0; i < count; ++i)
      if (of[i] == request) found.push_back(i);
    return found;
  };
  // Copies the rows of one tensor with the given indices: from a tensor with `room` rows per head,
  // or back into it.
  const auto copy = [](const mock::Layer& layer, uint8_t* tensor, int64_t room,
                       const std::vector<int64_t>& places, uint8_t* own, bool is_back) {
    for (int64_t head = 0; head < layer.kv_heads; ++head)
      for (const int64_t place : places) {
        uint8_t* const one = tensor + (head * room + place) * layer.row_bytes;
        std::memcpy(is_back ? one : own, is_back ? own : one, static_cast<size_t>(layer.row_bytes));
        own += layer.row_bytes;
      }
  };
  const int64_t count = 1 + *std::max_element(of_tokens, of_tokens + pass.tokens);
  for (int64_t request = 0; request < count; ++request) {
    const auto tokens = indices(of_tokens, pass.tokens, request);
    std::vector<int64_t> cached, ids, positions, scored, scored_at;
    for (const int64_t i : indices(requests, row_count, request)) cached.push_back(rows[i]);
    for (const int64_t token : tokens)
      ids.push_back(pass.ids[token]), positions.push_back(pass.positions[token]);
    for (int32_t r = 0; r < pass.rows; ++r) {
      const auto place = std::find(tokens.begin(), tokens.end(), pass.score_rows[r]);
      if (place == tokens.end()) continue;
      scored.push_back(place - tokens.begin()), scored_at.push_back(r);
    }
    mock::Pass own{};
    own.tokens = static_cast<int32_t>(tokens.size());
    own.cached = static_cast<int32_t>(cached.size());
    own.ids = ids.data(), own.positions = positions.data();
    std::vector<std::vector<uint8_t>> pasts, presents;
    for (size_t i = 0; i < pass.past.size(); ++i) {
      const mock::Layer& layer = shape.layers[i / 2];
      auto& past = pasts.emplace_back(static_cast<size_t>(layer.bytes(own.cached)));
      copy(layer, const_cast<uint8_t*>(pass.past[i]), pass.cached, cached, past.data(), false);
      if (!pass.present.empty())
        presents.emplace_back(static_cast<size_t>(layer.bytes(own.tokens)));
    }
    for (const auto& past : pasts) own.past.push_back(past.data());
    for (auto& present : presents) own.present.push_back(present.data());
    // Score one row at a time, because the rows of a request may be anywhere in the outputs.
    for (size_t r = 0; r < scored.size(); ++r) {
      own.rows = 1, own.score_rows = &scored[r];
      const int64_t at = scored_at[r];
      own.top_tokens = pass.top_tokens + at * shape.top_k;
      own.top_probs = pass.top_probs + at * shape.top_k;
      own.top_log_odds = pass.top_log_odds + at * shape.top_k;
      own.entropy = pass.entropy == nullptr ? nullptr : pass.entropy + at;
      own.logits = pass.logits == nullptr ? nullptr : pass.logits + at * shape.vocab;
      mock::denoise(shape, own);
    }
    if (scored.empty()) own.rows = 0, mock::denoise(shape, own);
    for (size_t i = 0; i < presents.size(); ++i)
      copy(shape.layers[i / 2], pass.present[i], pass.tokens, tokens, presents[i].data(), true);
  }
}

OrtStatus* run(OrtSession* session, const OrtRunOptions* options, const char* const* input_names,
               const OrtValue* const* inputs, size_t input_count, const char* const* output_names,
               size_t output_count, OrtValue** outputs) {
  if (OrtStatus* const failure = noted("Run")) return failure;
  std::map<std::string, const OrtValue*> values;
  for (size_t i = 0; i < input_count; ++i) values[input_names[i]] = inputs[i];
  if (values.size() != session->inputs.size())
    return refuse("an input is missing", ort::kInvalidArgument);
  const auto size = [&](const char* name, size_t dim) { return values[name]->shape[dim]; };
  const int64_t batch = size("input_ids", 0), tokens = size("input_ids", 1),
                cached = size("past_key.0", 2);
  const int64_t rows = size("score_rows", 1);
  for (size_t i = 0; i < output_count; ++i) values[output_names[i]] = outputs[i];
  std::string graph = "-1";
  if (options != nullptr) graph = options->entries.at("gpu_graph_id");
  if (session->has_graphs != (options != nullptr)) return refuse("a run without its options");
  if (graph != "-1") {
    std::map<std::string, std::pair<void*, size_t>> arrays;
    for (const auto& [name, value] : values) arrays[name] = {value->data, value->bytes};
    const auto [found, is_new] = session->graphs.try_emplace(graph, arrays);
    mock::note(is_new ? "captured" : found->second == arrays ? "replayed" : "stale_graph");
  }
  std::map<std::string, uint8_t*> data;
  for (const auto& [name, value] : values) {
    const bool is_on_device = graph != "-1" || name.compare(0, 5, "past_") == 0 ||
                              name.compare(0, 8, "present_") == 0 ||
                              (name == "logits" && value->where.name == "Cuda");
    data[name] = static_cast<uint8_t*>(view(*session, *value, is_on_device));
    if (data[name] == nullptr && value->bytes > 0) return refuse("outside of memory: " + name);
    size_t bytes = element_bytes(value->type);
    for (const int64_t dim : value->shape) bytes *= static_cast<size_t>(dim);
    if (bytes != value->bytes) return refuse("another size: " + name);
    if (value->where.name == "Cpu" && session->provider != kCpu) mock::note(name + "_on_host");
  }
  const auto at = [&](const std::string& name, int64_t offset) -> uint8_t* {
    const auto found = data.find(name);
    return found == data.end() ? nullptr : found->second + offset;
  };
  const mock::Shape& shape = session->shape;
  for (int64_t request = 0; request < batch; ++request) {
    mock::Pass pass{};
    pass.tokens = static_cast<int32_t>(tokens), pass.cached = static_cast<int32_t>(cached),
    pass.rows = static_cast<int32_t>(rows);
    pass.ids = reinterpret_cast<int64_t*>(at("input_ids", request * tokens * 8));
    pass.positions = reinterpret_cast<int64_t*>(at("position_ids", request * tokens * 8));
    pass.score_rows = reinterpret_cast<int64_t*>(at("score_rows", request * rows * 8));
    pass.top_tokens = reinterpret_cast<int32_t*>(at("top_token", request * rows * shape.top_k * 4));
    pass.top_probs = reinterpret_cast<float*>(at("top_prob", request * rows * shape.top_k * 4));
    pass.top_log_odds =
        reinterpret_cast<float*>(at("top_log_odds", request * rows * shape.top_k * 4));
    pass.entropy = reinterpret_cast<float*>(at("entropy", request * rows * 4));
    pass.logits = reinterpret_cast<float*>(at("logits", request * rows * shape.vocab * 4));
    if (const int64_t width = int64_t{4} * shape.conditioning; width > 0) {
      pass.conditioning = reinterpret_cast<float*>(at("conditioning", request * tokens * width));
      pass.temperature = reinterpret_cast<float*>(at("temperature", request * rows * 4));
      pass.next_conditioning =
          reinterpret_cast<float*>(at("next_conditioning", request * rows * width));
    }
    for (size_t i = 0; i < shape.layers.size(); ++i)
      for (const char* const what : {"key.", "value."}) {
        const std::string number = what + std::to_string(i);
        pass.past.push_back(at("past_" + number, request * shape.layers[i].bytes(pass.cached)));
        if (data.count("present_" + number) != 0)
          pass.present.push_back(
              at("present_" + number, request * shape.layers[i].bytes(pass.tokens)));
      }
    if (session->chooses_rows) {
      const auto list = [&](const char* name) { return reinterpret_cast<int64_t*>(at(name, 0)); };
      denoise_requests(shape, pass, list("cached_rows"), list("cached_requests"),
                       size("cached_rows", 0), list("token_requests"));
    } else {
      mock::denoise(shape, pass);
    }
    if (session->is_nan) pass.top_probs[0] = __builtin_nanf("");
  }
  return nullptr;
}

// ---- The table ----

constexpr size_t kSlots = 420;
void* table[kSlots];

template <class Entry>
void put(typename Entry::Pointer function) {
  table[Entry::slot] = reinterpret_cast<void*>(function);
}

template <class Options>
OrtStatus* update(Options* options, const char* const* keys, const char* const* values,
                  size_t count) {
  const std::string missing = variable("MOCK_ORT_LIBRARIES", "");
  if (!missing.empty())
    return refuse(
        "/onnxruntime_src/provider_bridge_ort.cc:2043 Get() [ONNXRuntimeError] : 1 : FAIL : Failed "
        "to load library "
        "libonnxruntime_providers_cuda.so with error: " +
        missing + "\nsecond line");
  for (size_t i = 0; i < count; ++i) options->given[keys[i]] = values[i];
  return nullptr;
}

// The devices of the registered libraries, which all environments share.
std::vector<OrtEpDevice>& devices() {
  static std::vector<OrtEpDevice> all = {{kCpu, 0, {}}};
  return all;
}

// The devices are in the reverse of CUDA's order.
OrtStatus* register_library(OrtEnv*, const char* name, const char* path) {
  if (path[0] != '/') return refuse("no such file in ONNX Runtime's folder");
  for (const OrtEpDevice& device : devices())
    if (device.provider == name) return refuse(std::string(name) + " is already registered");
  OrtCUDAProviderOptionsV2 unused;
  if (OrtStatus* const failure = update(&unused, nullptr, nullptr, 0)) return failure;
  for (int i = std::stoi(variable("MOCK_CUDA_DEVICES", "1")); i-- > 0;) {
    OrtEpDevice device{name, i, {}};
    if (variable("MOCK_ORT_NO_BUS", "").empty())
      device.hardware.metadata.values["pci_bus_id"] = "0000:0" + std::to_string(i) + ":00.0";
    device.metadata.values["version"] = variable("MOCK_RTX_VERSION", "0.5.0");
    devices().push_back(device);
  }
  return nullptr;
}

template <class Options>
OrtStatus* append(OrtSessionOptions* options, const Options* given, const char* provider) {
  if (OrtStatus* const failure = noted("AppendProvider")) return failure;
  options->providers.push_back(provider);
  options->device = std::stoi(given->given.at("device_id"));
  const auto graphs = given->given.find("enable_cuda_graph");
  options->has_graphs = graphs != given->given.end() && graphs->second == "1";
  return nullptr;
}

OrtStatus* ports_count(const std::vector<std::pair<std::string, OrtTypeInfo>>& ports,
                       size_t* count) {
  *count = ports.size();
  return nullptr;
}

OrtStatus* port_name(const std::vector<std::pair<std::string, OrtTypeInfo>>& ports, size_t index,
                     char** name) {
  *name = strdup(ports[index].first.c_str());
  return nullptr;
}

OrtStatus* port_type(const std::vector<std::pair<std::string, OrtTypeInfo>>& ports, size_t index,
                     OrtTypeInfo** type) {
  *type = new OrtTypeInfo(ports[index].second);
  return nullptr;
}

void fill_table() {
  using namespace ort;
  put<CreateStatus>([](int code, const char* message) { return refuse(message, code); });
  put<GetErrorCode>([](const OrtStatus* status) { return status->code; });
  put<GetErrorMessage>([](const OrtStatus* status) { return status->message.c_str(); });
  put<CreateEnv>([](int, const char*, OrtEnv** out) {
    return *out = new OrtEnv, static_cast<OrtStatus*>(nullptr);
  });
  put<CreateSession>(create_session);
  put<Run>(run);
  put<CreateSessionOptions>([](OrtSessionOptions** out) {
    return *out = new OrtSessionOptions, static_cast<OrtStatus*>(nullptr);
  });
  const auto ignore = [](OrtSessionOptions*, int) -> OrtStatus* { return nullptr; };
  put<SetSessionExecutionMode>(ignore), put<SetSessionLogSeverityLevel>(ignore),
      put<SetSessionGraphOptimizationLevel>(ignore);
  put<SetUserLoggingFunction>(
      [](OrtSessionOptions*, auto, void*) -> OrtStatus* { return nullptr; });
  put<SetIntraOpNumThreads>(ignore), put<SetInterOpNumThreads>(ignore);
  put<DisableMemPattern>([](OrtSessionOptions*) -> OrtStatus* { return nullptr; });
  put<CreateCustomOpDomain>([](const char*, OrtCustomOpDomain** out) {
    return *out = new OrtCustomOpDomain, static_cast<OrtStatus*>(nullptr);
  });
  put<CustomOpDomainAdd>([](OrtCustomOpDomain*, const CustomOp*) -> OrtStatus* { return nullptr; });
  put<AddCustomOpDomain>(
      [](OrtSessionOptions*, OrtCustomOpDomain*) { return noted("AddCustomOpDomain"); });
  put<SessionGetInputCount>(
      [](const OrtSession* session, size_t* count) { return ports_count(session->inputs, count); });
  put<SessionGetOutputCount>([](const OrtSession* session, size_t* count) {
    return ports_count(session->outputs, count);
  });
  put<SessionGetInputName>([](const OrtSession* session, size_t i, OrtAllocator*, char** name) {
    return port_name(session->inputs, i, name);
  });
  put<SessionGetOutputName>([](const OrtSession* session, size_t i, OrtAllocator*, char** name) {
    return port_name(session->outputs, i, name);
  });
  put<SessionGetInputTypeInfo>([](const OrtSession* session, size_t i, OrtTypeInfo** type) {
    return port_type(session->inputs, i, type);
  });
  put<SessionGetOutputTypeInfo>([](const OrtSession* session, size_t i, OrtTypeInfo** type) {
    return port_type(session->outputs, i, type);
  });
  put<CreateTensorWithDataAsOrtValue>([](const OrtMemoryInfo* where, void* data, size_t bytes,
                                         const int64_t* shape, size_t rank, int type,
                                         OrtValue** out) -> OrtStatus* {
    *out = new OrtValue{*where, data, bytes, type, std::vector<int64_t>(shape, shape + rank)};
    return nullptr;
  });
  put<CastTypeInfoToTensorInfo>(
      [](const OrtTypeInfo* info, const OrtTensorTypeAndShapeInfo** out) -> OrtStatus* {
        *out = &info->tensor;
        return nullptr;
      });
  put<GetTensorElementType>([](const OrtTensorTypeAndShapeInfo* info, int* type) -> OrtStatus* {
    *type = info->type;
    return nullptr;
  });
  put<GetDimensionsCount>([](const OrtTensorTypeAndShapeInfo* info, size_t* rank) -> OrtStatus* {
    *rank = info->dims.size();
    return nullptr;
  });
  put<GetDimensions>(
      [](const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t rank) -> OrtStatus* {
        std::copy_n(info->dims.begin(), rank, dims);
        return nullptr;
      });
  put<CreateMemoryInfo>(
      [](const char* name, int, int device, int, OrtMemoryInfo** out) -> OrtStatus* {
        *out = new OrtMemoryInfo{name, device};
        return nullptr;
      });
  put<CreateCpuMemoryInfo>([](int, int, OrtMemoryInfo** out) -> OrtStatus* {
    *out = new OrtMemoryInfo{"Cpu", 0};
    return nullptr;
  });
  put<GetAllocatorWithDefaultOptions>([](OrtAllocator** out) -> OrtStatus* {
    *out = nullptr;
    return nullptr;
  });
  put<AllocatorFree>([](OrtAllocator*, void* memory) -> OrtStatus* {
    std::free(memory);
    return nullptr;
  });
  put<ReleaseEnv>([](OrtEnv* one) { delete one; });
  put<ReleaseStatus>([](OrtStatus* one) { delete one; });
  put<ReleaseMemoryInfo>([](OrtMemoryInfo* one) { delete one; });
  put<CreateRunOptions>([](OrtRunOptions** out) -> OrtStatus* {
    *out = new OrtRunOptions;
    return nullptr;
  });
  put<AddRunConfigEntry>(
      [](OrtRunOptions* options, const char* key, const char* value) -> OrtStatus* {
        options->entries[key] = value;
        return nullptr;
      });
  put<ReleaseRunOptions>([](OrtRunOptions* one) { delete one; });
  put<ReleaseSession>([](OrtSession* one) { delete one; });
  put<ReleaseValue>([](OrtValue* one) { delete one; });
  put<ReleaseTypeInfo>([](OrtTypeInfo* one) { delete one; });
  put<ReleaseSessionOptions>([](OrtSessionOptions* one) { delete one; });
  put<ReleaseCustomOpDomain>([](OrtCustomOpDomain* one) { delete one; });
  put<GetAvailableProviders>([](char*** names, int* count) -> OrtStatus* {
    const auto all =
        split(variable("MOCK_ORT_PROVIDERS",
                       "TensorrtExecutionProvider,CUDAExecutionProvider,CPUExecutionProvider"));
    *names = new char*[all.size()];
    for (size_t i = 0; i < all.size(); ++i) (*names)[i] = strdup(all[i].c_str());
    *count = static_cast<int>(all.size());
    return nullptr;
  });
  put<ReleaseAvailableProviders>([](char** names, int count) -> OrtStatus* {
    for (int i = 0; i < count; ++i) std::free(names[i]);
    delete[] names;
    return nullptr;
  });
  put<AddSessionConfigEntry>(
      [](OrtSessionOptions* options, const char* key, const char* value) -> OrtStatus* {
        options->entries[key] = value;
        return nullptr;
      });
  put<CreateCudaProviderOptions>([](OrtCUDAProviderOptionsV2** out) -> OrtStatus* {
    *out = new OrtCUDAProviderOptionsV2;
    return nullptr;
  });
  put<UpdateCudaProviderOptions>(update<OrtCUDAProviderOptionsV2>);
  put<AppendCudaProvider>([](OrtSessionOptions* options, const OrtCUDAProviderOptionsV2* given) {
    return append(options, given, "CUDAExecutionProvider");
  });
  put<ReleaseCudaProviderOptions>([](OrtCUDAProviderOptionsV2* one) { delete one; });
  put<CreateTensorRtProviderOptions>([](OrtTensorRTProviderOptionsV2** out) -> OrtStatus* {
    *out = new OrtTensorRTProviderOptionsV2;
    return nullptr;
  });
  put<UpdateTensorRtProviderOptions>(update<OrtTensorRTProviderOptionsV2>);
  put<AppendTensorRtProvider>(
      [](OrtSessionOptions* options, const OrtTensorRTProviderOptionsV2* given) {
        return append(options, given, "TensorrtExecutionProvider");
      });
  put<ReleaseTensorRtProviderOptions>([](OrtTensorRTProviderOptionsV2* one) { delete one; });
  put<RegisterProviderLibrary>(register_library);
  put<UnregisterProviderLibrary>([](OrtEnv*, const char* name) -> OrtStatus* {
    auto& all = devices();
    const auto ours = [&](const OrtEpDevice& device) { return device.provider == name; };
    all.erase(std::remove_if(all.begin(), all.end(), ours), all.end());
    return nullptr;
  });
  put<GetProviderDevices>(
      [](const OrtEnv*, const OrtEpDevice* const** out, size_t* count) -> OrtStatus* {
        static std::vector<const OrtEpDevice*> pointers;
        pointers.clear();
        for (const OrtEpDevice& device : devices()) pointers.push_back(&device);
        *out = pointers.data(), *count = pointers.size();
        return nullptr;
      });
  put<ProviderDeviceGetProvider>([](const OrtEpDevice* one) { return one->provider.c_str(); });
  put<ProviderDeviceGetHardware>([](const OrtEpDevice* one) { return &one->hardware; });
  put<ProviderDeviceGetMetadata>([](const OrtEpDevice* one) { return &one->metadata; });
  put<HardwareGetMetadata>([](const OrtHardwareDevice* one) { return &one->metadata; });
  put<GetKeyValue>([](const OrtKeyValuePairs* pairs, const char* key) -> const char* {
    const auto found = pairs->values.find(key);
    return found == pairs->values.end() ? nullptr : found->second.c_str();
  });
  put<AppendProviderDevices>([](OrtSessionOptions* options, OrtEnv*, const OrtEpDevice* const* all,
                                size_t count, const char* const* keys, const char* const* values,
                                size_t pairs) {
    if (count != 1) return refuse("one device is expected");
    if (pairs != 1 || keys[0] != std::string("nv_runtime_cache_path"))
      return refuse("nv_runtime_cache_path is expected");
    if (values[0][0] != '\0') std::ofstream(values[0] + std::string("/kernels")) << "compiled";
    const OrtCUDAProviderOptionsV2 given{{{"device_id", std::to_string(all[0]->device)}}};
    return append(options, &given, all[0]->provider.c_str());
  });
  put<GetPlacement>([](const OrtSession* session, const OrtEpAssignedSubgraph* const** parts,
                       size_t* count) -> OrtStatus* {
    if (!session->is_recorded) return refuse("placement was not recorded");
    *parts = session->pointers.data(), *count = session->pointers.size();
    return nullptr;
  });
  put<PlacementGetProvider>([](const OrtEpAssignedSubgraph* part, const char** out) -> OrtStatus* {
    *out = part->provider.c_str();
    return nullptr;
  });
  put<PlacementGetNodes>([](const OrtEpAssignedSubgraph* part,
                            const OrtEpAssignedNode* const** nodes, size_t* count) -> OrtStatus* {
    *nodes = part->pointers.data(), *count = part->pointers.size();
    return nullptr;
  });
  put<PlacedNodeGetName>([](const OrtEpAssignedNode* node, const char** out) -> OrtStatus* {
    *out = node->name.c_str();
    return nullptr;
  });
  put<PlacedNodeGetDomain>([](const OrtEpAssignedNode* node, const char** out) -> OrtStatus* {
    *out = node->domain.c_str();
    return nullptr;
  });
  put<PlacedNodeGetOperator>([](const OrtEpAssignedNode* node, const char** out) -> OrtStatus* {
    *out = node->op.c_str();
    return nullptr;
  });
}

}  // namespace

extern "C" const ort::ApiBase* OrtGetApiBase() {
  static const std::string version = variable("MOCK_ORT_VERSION", "1.31.1");
  static const ort::ApiBase base = {
      [](uint32_t wanted) -> const void* {
        fill_table();
        return wanted <= static_cast<uint32_t>(std::stoi(version.substr(2))) ? table : nullptr;
      },
      [] { return version.c_str(); },
  };
  return &base;
}
