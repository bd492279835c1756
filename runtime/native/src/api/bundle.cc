// The C ABI of bundles: opens bundles, and returns their properties and policies.
#include <sched.h>

#include <algorithm>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "api/handles.h"

using dlm::require;

namespace {

// Returns the value of the member `size` if it is the same in all layers. Otherwise returns 0.
int32_t of_all_layers(const dlm::CacheShape& cache, int32_t dlm::CacheLayer::* size) {
  const int32_t first = cache.front().*size;
  const auto same = [&](const dlm::CacheLayer& layer) { return layer.*size == first; };
  return std::all_of(cache.begin(), cache.end(), same) ? first : 0;
}

dlm_denoiser default_denoiser() {
  dlm_denoiser denoiser{};
  denoiser.struct_size = sizeof denoiser;
  denoiser.top_k = 2;
  denoiser.kv_element_bytes = 4;
  denoiser.max_new_tokens = dlm::Denoiser{}.max_new_tokens;
  denoiser.expand_token_id = denoiser.delete_token_id = denoiser.split_token_id = -1;
  return denoiser;
}

dlm_open_options default_open_options() {
  dlm_open_options options{};
  options.struct_size = sizeof options;
  options.engine = "auto";
  options.check_hashes = 1;
  options.provider = "cpu";
  options.log_severity = DLM_LOG_WARNING;
  return options;
}

dlm::ProviderChoice provider_of(const dlm_open_options& options) {
  return {options.provider == nullptr ? "" : options.provider, options.device,
          options.allow_fallback != 0,
          options.provider_library == nullptr ? "" : options.provider_library,
          options.cuda_graphs != 0};
}

// On GPUs, all layers keep the rows of all positions, in order. The graph masks the rows outside of
// a layer's window.
void drop_windows(dlm::CacheShape& cache) {
  for (dlm::CacheLayer& layer : cache) layer.window = 0;
}

// The engines that a caller can choose by name. A caller can also choose "auto", which means the
// engine that the manifest names.
constexpr const char* kEngines[] = {"onnxruntime", "tensorrt", "none"};

std::unique_ptr<dlm::Engine> open_engine(const dlm::Manifest& manifest, const std::string& library,
                                         int threads, const dlm::ProviderChoice& provider,
                                         const dlm::Log& log) {
  if (manifest.engine == "none") return dlm::make_none(manifest.denoiser.cache);
  if (manifest.engine == "onnxruntime")
    return dlm::open_onnxruntime(manifest.graph, library, threads, provider, log);
  if (manifest.engines.empty())
    dlm::fail(
        DLM_UNSUPPORTED,
        "this bundle has no TensorRT engine. %s, or run it on the CPU with engine \"onnxruntime\"",
        manifest.is_for_gpus ? manifest.device_advice.c_str() : "Build it with --target for GPUs");
  return dlm::open_tensorrt(manifest.graph, manifest.engines, library, log);
}

// Returns the engine that the caller chose, which may be "auto". Throws an error if the caller
// chose a GPU provider together with an engine other than ONNX Runtime.
std::string choose_engine(const dlm_open_options& options) {
  const std::string engine = options.engine == nullptr ? "" : options.engine;
  if (engine != "auto" &&
      std::find(std::begin(kEngines), std::end(kEngines), engine) == std::end(kEngines)) {
    std::string names = "auto";
    for (const char* const kind : kEngines) names += std::string(", ") + kind;
    dlm::fail(DLM_UNSUPPORTED, "engine \"%.40s\" is not one of: %s", engine.c_str(), names.c_str());
  }
  const dlm::ProviderChoice provider = provider_of(options);
  if (engine == "tensorrt" && provider.is_gpu())
    dlm::fail(
        DLM_INVALID_ARGUMENT,
        "provider \"%.40s\" is for engine \"onnxruntime\": engine \"tensorrt\" runs engine files",
        provider.name.c_str());
  if (provider.cuda_graphs && provider.name != "cuda")
    dlm::fail(DLM_INVALID_ARGUMENT,
              "cuda_graphs is for provider \"cuda\", not for provider \"%.40s\"",
              provider.name.c_str());
  return engine == "auto" && provider.is_gpu() ? "onnxruntime" : engine;
}

// Returns the number of cores that this process may use, or 0 if this number is unknown.
int available_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  // sched_getaffinity fails if the machine has more cores than a cpu_set_t can describe.
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Returns `wanted`, limited to the number of cores. More threads than cores do not make passes
// faster, and starting thousands of threads takes minutes.
int limit_threads(int32_t wanted) {
  dlm::check_range("threads", wanted, 0, 4096);
  const int cores = available_cores();
  return cores > 0 ? std::min<int>(wanted, cores) : wanted;
}

std::string names_of(const dlm::Policies& policies) {
  std::string names;
  for (const auto& [name, fields] : policies) names += (names.empty() ? "" : ", ") + name;
  return names;
}

const dlm_policy& find_preset(const dlm::Manifest& manifest, const std::string& name) {
  if (const dlm_policy* const found = dlm::find_policy(manifest.presets, name)) return *found;
  dlm::fail(DLM_NOT_FOUND, "preset \"%.40s\" is not one of this bundle's: %s", name.c_str(),
            manifest.presets.empty() ? "it has none" : names_of(manifest.presets).c_str());
}

const dlm_policy& find_effort(const dlm::Manifest& manifest, const char* preset,
                              const std::string& level) {
  if (manifest.efforts.empty()) {
    const auto verifies = [](const auto& each) {
      return std::string_view(each.second.commit) == "verify";
    };
    if (std::all_of(manifest.presets.begin(), manifest.presets.end(), verifies))
      dlm::fail(DLM_NOT_FOUND,
                "effort \"%.40s\": this bundle has no levels, because its text does not depend on "
                "its passes: remove effort",
                level.c_str());
    dlm::fail(DLM_NOT_FOUND,
              "effort \"%.40s\": this bundle has no levels: `dlm-export effort BUNDLE --data FILE` "
              "fits instant, low, medium and high",
              level.c_str());
  }
  if (preset != nullptr && preset != manifest.effort_preset)
    dlm::fail(DLM_INVALID_ARGUMENT,
              "effort %.40s was fitted for preset %.40s, not for %.40s: set only one of the two",
              level.c_str(), manifest.effort_preset.c_str(), preset);
  if (const dlm_policy* const found = dlm::find_policy(manifest.efforts, level)) return *found;
  dlm::fail(DLM_NOT_FOUND, "effort \"%.40s\" is not one of %s", level.c_str(),
            names_of(manifest.efforts).c_str());
}

// Fills the struct that dlm_bundle_describe returns.
void finish_opening(dlm_bundle& bundle) {
  bundle.engine_description = bundle.engine->description();
  const dlm::Denoiser& d = bundle.manifest.denoiser;
  bundle.denoiser = default_denoiser();
  dlm_denoiser& told = bundle.denoiser;
  told.vocab_size = d.vocab_size;
  told.mask_token_id = d.mask_token_id;
  told.max_canvas_length = d.max_canvas_length;
  told.layers = static_cast<int32_t>(d.cache.size());
  told.kv_heads = of_all_layers(d.cache, &dlm::CacheLayer::kv_heads);
  told.head_size = of_all_layers(d.cache, &dlm::CacheLayer::head_size);
  told.top_k = d.top_k;
  told.kv_element_bytes = of_all_layers(d.cache, &dlm::CacheLayer::element_bytes);
  told.shift = d.shift;
  told.has_cache = d.has_cache ? 1 : 0;
  told.eos_token_ids = d.eos_token_ids.data();
  told.eos_count = d.eos_token_ids.size();
  told.visible_block = d.visible_block;
  told.max_new_tokens = d.max_new_tokens;
  told.draft_block = d.draft_block;
  told.conditioning_size = d.conditioning_size;
  told.expand_token_id = d.expand_token_id;
  told.delete_token_id = d.delete_token_id;
  told.shifted_drafts = d.has_shifted_drafts ? 1 : 0;
  told.blocks_after_prompt = d.blocks_after_prompt ? 1 : 0;
  told.split_token_id = d.split_token_id;
  bundle.info = {sizeof bundle.info, &bundle.denoiser, bundle.manifest.text.c_str(),
                 bundle.engine_description.c_str()};
}

}  // namespace

uint32_t dlm_abi_version(void) { return DLM_ABI_VERSION; }

const char* dlm_version(void) { return DLM_VERSION; }

const char* dlm_status_name(dlm_status status) {
  static constexpr const char* kNames[] = {
      "OK",          "INVALID_ARGUMENT", "NOT_FOUND",     "BAD_BUNDLE",
      "UNSUPPORTED", "ENGINE_FAILED",    "OUT_OF_MEMORY", "CANCELLED",
      "INTERNAL",    "ENGINE_MISSING",   "BUSY"};
  static_assert(std::size(kNames) == DLM_BUSY + 1);
  return status >= 0 && status <= DLM_BUSY ? kNames[status] : "unknown status";
}

void dlm_denoiser_init(dlm_denoiser* denoiser, size_t struct_size) {
  dlm::give(default_denoiser(), struct_size, denoiser);
}

void dlm_policy_init(dlm_policy* policy, size_t struct_size) {
  dlm::give(dlm::default_policy(), struct_size, policy);
}

const dlm_policy_field* dlm_policy_field_at(size_t index) {
  return index < std::size(dlm::kPolicyFields) ? &dlm::kPolicyFields[index] : nullptr;
}

void dlm_open_options_init(dlm_open_options* options, size_t struct_size) {
  dlm::give(default_open_options(), struct_size, options);
}

dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                           size_t message_capacity, dlm_bundle** bundle) {
  return dlm::make(bundle, "bundle", message, message_capacity, [&] {
    require(path, "path");
    dlm_open_options chosen = default_open_options();
    if (options != nullptr) chosen = dlm::take(*options, chosen, "dlm_open_options");
    const std::string engine = choose_engine(chosen);
    auto opened = std::make_unique<dlm_bundle>();
    const std::string library = chosen.engine_library == nullptr ? "" : chosen.engine_library;
    const int threads = limit_threads(chosen.threads);
    dlm::check_range("log_severity", chosen.log_severity, DLM_LOG_VERBOSE, DLM_LOG_FATAL);
    const dlm::Log log{chosen.on_log, chosen.log_user, chosen.log_severity};
    opened->manifest = dlm::read_bundle(path, chosen.check_hashes != 0, engine);
    const dlm::ProviderChoice provider = provider_of(chosen);
    if (opened->manifest.engine == "tensorrt" || provider.is_gpu()) {
      drop_windows(opened->manifest.denoiser.cache);
      drop_windows(opened->manifest.graph.cache);
    }
    // std::async may hash the files on a second thread while the engine opens them.
    std::future<void> hashed = std::async([&files = opened->manifest.unhashed] {
      for (const dlm::FileHash& file : files) dlm::check_hash(file);
    });
    try {
      opened->engine = open_engine(opened->manifest, library, threads, provider, log);
    } catch (...) {
      hashed.get();  // if a file is damaged, this throws an error that explains why the engine
                     // failed
      throw;
    }
    hashed.get();
    opened->manifest.denoiser.keeps_conditioning = opened->engine->keeps_conditioning();
    finish_opening(*opened);
    return opened.release();
  });
}

dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run, void* user,
                                    char* message, size_t message_capacity, dlm_bundle** bundle) {
  return dlm::make(bundle, "bundle", message, message_capacity, [&] {
    require(denoiser, "denoiser");
    auto opened = std::make_unique<dlm_bundle>();
    opened->manifest.denoiser =
        dlm::check_denoiser(dlm::take(*denoiser, default_denoiser(), "dlm_denoiser"));
    opened->engine = dlm::make_callback(run, user, opened->manifest.denoiser);
    finish_opening(*opened);
    return opened.release();
  });
}

void dlm_bundle_destroy(dlm_bundle* bundle) { delete bundle; }

const dlm_bundle_info* dlm_bundle_describe(const dlm_bundle* bundle) {
  return bundle == nullptr ? nullptr : &bundle->info;
}

dlm_status dlm_bundle_policy(const dlm_bundle* bundle, const char* preset, const char* effort,
                             char* message, size_t message_capacity, dlm_policy* policy) {
  return dlm::guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    require(policy, "policy");
    dlm::take(*policy, *policy, "dlm_policy");  // throws an error if struct_size is wrong
    const dlm::Manifest& manifest = bundle->manifest;
    const dlm_policy& found =
        effort != nullptr
            ? find_effort(manifest, preset, effort)
            : find_preset(manifest, preset == nullptr ? manifest.default_preset : preset);
    dlm::give(found, policy->struct_size, policy);
  });
}
