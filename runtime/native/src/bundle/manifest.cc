#include "bundle/manifest.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "base/sha256.h"
#include "engines/graph_check.h"
#include "kernels/kernels.h"

namespace dlm {
namespace {

constexpr int64_t kSchemaVersion = 2;
constexpr int64_t kManifestLimitBytes = 4 << 20, kTextLimitBytes = 256 << 20;
constexpr int32_t kMostConditioning = 1 << 16;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kAgain = "Build or copy the bundle again.";

// Returns the size of a regular file in bytes. If the file is missing, throws an error whose status
// is the argument `missing`.
int64_t file_bytes(const std::string& path, const char* advice = kAgain,
                   dlm_status missing = DLM_NOT_FOUND) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0)
    fail(missing, "%s: %s. %s", path.c_str(), std::strerror(errno), advice);
  if (!S_ISREG(info.st_mode)) fail(DLM_BAD_BUNDLE, "%s: not a plain file", path.c_str());
  return info.st_size;
}

std::string read_file(const std::string& path, int64_t limit, const char* what) {
  const int64_t bytes = file_bytes(path);
  if (bytes > limit)
    fail(DLM_BAD_BUNDLE, "%s: %lld bytes is too large for %s", path.c_str(),
         static_cast<long long>(bytes), what);
  std::string data(static_cast<size_t>(bytes), '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(data.data(), bytes)) fail(DLM_BAD_BUNDLE, "%s: cannot read", path.c_str());
  return data;
}

// Throws an error if a file of the bundle, or a folder inside the bundle, is a symbolic link,
// because the link may point outside the bundle. The path of the bundle itself may contain links,
// because the caller chose this path.
void refuse_links(const std::string& folder, const std::string& name) {
  for (size_t end = name.find('/');; end = name.find('/', end + 1)) {
    const std::string path = folder + "/" + name.substr(0, end);
    struct stat info{};
    if (lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode))
      fail(DLM_BAD_BUNDLE,
           "%s: not a plain file but a symbolic link, which may point outside the bundle. Copy the "
           "bundle with what its links point to: cp -rL.",
           path.c_str());
    if (end == std::string::npos) return;
  }
}

std::string read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifest;
  struct stat info{};
  if (folder.empty())
    fail(DLM_NOT_FOUND,
         "the bundle's path is empty: give the folder that `dlm-export build` wrote");
  if (stat(folder.c_str(), &info) != 0)
    fail(DLM_NOT_FOUND, "%s: %s. Give the folder that `dlm-export build` wrote.", folder.c_str(),
         std::strerror(errno));
  if (!S_ISDIR(info.st_mode))
    fail(DLM_NOT_FOUND, "%s: not a folder. A bundle is the folder that `dlm-export build` writes.",
         folder.c_str());
  refuse_links(folder, kManifest);
  if (stat(path.c_str(), &info) != 0)
    fail(DLM_NOT_FOUND,
         "%s: not a bundle: it has no manifest.json. `dlm-export build` writes bundles.",
         folder.c_str());
  return read_file(path, kManifestLimitBytes, "a manifest");
}

// Returns true if a file name stays inside the bundle's folder.
bool is_safe_name(const std::string& name) {
  for (const char* const part : {"//", "/./", "/../"})
    if (("/" + name + "/").find(part) != std::string::npos) return false;
  return name.size() <= 255 && std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return c > ' ' && c < 127 && c != '\\';
         });
}

const std::string& read_hash(const json::Value& object, const char* key) {
  const std::string& hash = object.string(key);
  if (hash.size() != 64 || hash.find_first_not_of("0123456789abcdef") != std::string::npos)
    object.at(key).refuse("expected 64 lower-case hexadecimal digits");
  return hash;
}

constexpr const char* kEngines = "engines/";  // folder of engine files
constexpr int64_t kLarge = 16 << 20;  // a file of at least this many bytes is large; hashing this
                                      // many bytes takes about 10 ms

// Checks the files that the manifest lists. Engine files are checked only if a TensorRT engine may
// run. So if an engine file is damaged, the CPU can still run the graph, and the user can rebuild
// the engine. If no TensorRT engine may run, this function does not check the hashes of large
// files. Instead, the function returns these files. `records` applies only to large files, because
// hashing a small file is faster than finding its record.
std::vector<FileHash> check_files(const json::Value& files, const std::string& folder,
                                  bool check_hashes, bool with_engines, Records records) {
  std::vector<FileHash> left;
  for (const json::Value& entry : files.members()) {
    entry.refuse_unknown({"bytes", "sha256"});
    if (!is_safe_name(entry.key())) entry.refuse("not a plain file name inside the bundle");
    refuse_links(folder, entry.key());
    const std::string path = folder + "/" + entry.key();
    const int64_t expected = entry.integer("bytes", 0, int64_t{1} << 50);
    const std::string& hash = read_hash(entry, "sha256");
    const bool is_engine = entry.key().compare(0, std::strlen(kEngines), kEngines) == 0;
    if (is_engine && !with_engines) continue;
    const char* const advice = is_engine ? "Copy it again, or use dlm-export engine: --force "
                                           "builds it again, --remove takes it out."
                                         : kAgain;
    const int64_t found = file_bytes(path, advice, is_engine ? DLM_BAD_BUNDLE : DLM_NOT_FOUND);
    if (found != expected)
      fail(DLM_BAD_BUNDLE,
           "%s: %lld bytes, but the manifest says %lld: the file is truncated or was replaced. %s",
           path.c_str(), static_cast<long long>(found), static_cast<long long>(expected), advice);
    if (!check_hashes) continue;
    const FileHash file{path, hash, advice, found > kLarge ? records : Records::none};
    if (!with_engines && found > kLarge)
      left.push_back(file);
    else
      check_hash(file);
  }
  return left;
}

// Returns the file name in `name`, a member of the manifest. Throws an error if `files`, the
// manifest's list of files, lacks the name. Only files in this list are checked.
std::string listed(const json::Value& files, const json::Value& name) {
  if (files.find(name.string()) == nullptr) name.refuse("names a file that is not listed in files");
  return name.string();
}

// Returns a hash that changes if the graph or its weights change. The names of the files with the
// weights start with the name of the graph's file.
std::string hash_graph(const json::Value& files, const std::string& name) {
  std::map<std::string, std::string> hashes;
  for (const json::Value& entry : files.members())
    if (entry.key().compare(0, name.size(), name) == 0)
      hashes[entry.key()] = read_hash(entry, "sha256");
  std::string text;
  for (const auto& [file, hash] : hashes) text += file + " " + hash + "\n";
  return sha256_hex(text);
}

int32_t read_cache_type(const json::Value& graph) {
  const std::string& name = graph.string("cache_dtype");
  for (const auto& [known, type] : {std::pair{"float32", kFloat},
                                    {"float16", kFloat16},
                                    {"bfloat16", kBFloat16},
                                    {"int8", kInt8}})
    if (name == known) return type;
  graph.at("cache_dtype").refuse("expected \"float32\", \"float16\", \"bfloat16\" or \"int8\"");
}

int32_t read_size(const json::Value& object, const char* key, int32_t low, int32_t high) {
  return static_cast<int32_t>(object.integer(key, low, high));
}

// Reads the cache sizes of all layers that have keys and values, in the order of the layers in a
// pass.
CacheShape read_cache(const json::Value& graph, bool has_drafts) {
  const int32_t type = read_cache_type(graph);
  if (type == kInt8 && graph.find("device_file") != nullptr)
    graph.at("cache_dtype")
        .refuse("int8 keys and values are for CPUs, but the bundle has a device_file for GPUs");
  const auto element = static_cast<int32_t>(element_bytes(type));
  const int32_t scale = type == kInt8 ? static_cast<int32_t>(kRowScaleBytes) : 0;
  const json::Value& layers = graph.object("ports").at("layers");
  if (layers.elements().empty() || layers.elements().size() > 1024)
    layers.refuse("expected 1 to 1024 layers");
  CacheShape cache;
  for (const json::Value& layer : layers.elements()) {
    const json::Value* const window = layer.find("window");
    const int32_t known = window_of(cache);
    cache.push_back({read_size(layer, "kv_heads", 1, 4096), read_size(layer, "head_size", 1, 4096),
                     element, scale,
                     window == nullptr ? 0 : read_size(layer, "window", 1, 1 << 24)});
    if (window == nullptr) continue;
    if (!has_drafts) window->refuse("needs draft_block");
    if (known != 0 && cache.back().window != known)
      window->refuse("differs from the window of an earlier layer, " + std::to_string(known));
  }
  if (std::all_of(cache.begin(), cache.end(), [](const auto& layer) { return layer.window > 0; }))
    layers.refuse("at least one layer must have no window");
  return cache;
}

// Reads the names of the graph's inputs and outputs. The names must be short, printable and unique,
// because they are passed to ONNX Runtime and shown in messages.
PortNames read_ports(const json::Value& graph, bool has_conditioning, bool has_window) {
  std::set<std::string> taken;
  const auto name = [&](const json::Value& object, const char* key) {
    const std::string& text = object.string(key);
    const auto is_plain = [](unsigned char c) { return c > ' ' && c < 127; };
    if (text.empty() || text.size() > 128 || !std::all_of(text.begin(), text.end(), is_plain))
      object.at(key).refuse(
          "expected a port's name: 1 to 128 characters of printable ASCII without spaces");
    if (!taken.insert(text).second)
      object.at(key).refuse("another port has the name " + json::quoted(text) + " too");
    return text;
  };
  const json::Value& ports = graph.object("ports");
  ports.refuse_unknown({"input_ids",       "position_ids",    "score_rows",        "segments",
                        "window_segments", "cached_rows",     "cached_requests",   "token_requests",
                        "window_rows",     "window_requests", "window_distances",  "top_token",
                        "top_prob",        "top_log_odds",    "entropy",           "logits",
                        "conditioning",    "temperature",     "next_conditioning", "layers"});
  PortNames names{name(ports, "input_ids"),  name(ports, "position_ids"),
                  name(ports, "score_rows"), name(ports, "top_token"),
                  name(ports, "top_prob"),   name(ports, "top_log_odds"),
                  name(ports, "entropy"),    name(ports, "logits")};
  if (ports.find("segments") != nullptr) names.segments = name(ports, "segments");
  const json::Value* const window_segments = ports.find("window_segments");
  if (window_segments != nullptr) names.window_segments = name(ports, "window_segments");
  if (window_segments != nullptr && (!has_window || names.segments.empty()))
    window_segments->refuse("needs segments and a layer with a window");
  if (has_window && !names.segments.empty() && window_segments == nullptr)
    ports.refuse("a graph with segments and a layer with a window needs window_segments");
  for (const auto& [key, port] : {std::pair{"cached_rows", &names.cached_rows},
                                  std::pair{"cached_requests", &names.cached_requests},
                                  std::pair{"token_requests", &names.token_requests}}) {
    const json::Value* const found = ports.find(key);
    if (found != nullptr && graph.find("device_file") == nullptr)
      found->refuse("needs device_file");
    if (found != nullptr || !names.cached_rows.empty()) *port = name(ports, key);
    if (found != nullptr && names.cached_rows.empty()) found->refuse("needs cached_rows");
  }
  for (const auto& [key, port] : {std::pair{"window_rows", &names.window_rows},
                                  std::pair{"window_requests", &names.window_requests},
                                  std::pair{"window_distances", &names.window_distances}}) {
    if (has_window && !names.cached_rows.empty())
      *port = name(ports, key);
    else if (const json::Value* const found = ports.find(key); found != nullptr)
      found->refuse("needs cached_rows and a layer with a window");
  }
  for (const auto& [key, port] : {std::pair{"conditioning", &names.conditioning},
                                  std::pair{"temperature", &names.temperature},
                                  std::pair{"next_conditioning", &names.next_conditioning}}) {
    if (has_conditioning)
      *port = name(ports, key);
    else if (const json::Value* const found = ports.find(key); found != nullptr)
      found->refuse("needs conditioning_size above 0");
  }
  for (const json::Value& layer : ports.array("layers")) {
    layer.refuse_unknown({"kv_heads", "head_size", "window", "past_key", "past_value",
                          "present_key", "present_value"});
    names.layers.push_back({name(layer, "past_key"), name(layer, "past_value"),
                            name(layer, "present_key"), name(layer, "present_value")});
  }
  return names;
}

// Reads the members of a loop that say whether the denoiser has a mask token and self-conditioning.
void read_noise(const json::Value& loop, Denoiser& out) {
  const json::Value* const noise = loop.find("noise");
  const bool is_uniform = noise != nullptr && noise->string() == "uniform";
  if (noise != nullptr && !is_uniform && noise->string() != "absorbing")
    noise->refuse(json::quoted(noise->string()) + " is not known to this runtime");
  // A denoiser that starts from random tokens has no mask token, so mask_token_id is vocab_size.
  const int32_t lowest = is_uniform ? out.vocab_size : 0;
  out.mask_token_id = read_size(loop, "mask_token_id", lowest, out.vocab_size - !is_uniform);
  if (is_uniform && out.draft_block == 0) noise->refuse("needs draft_block");
  const json::Value* const size = loop.find("conditioning_size");
  if (size == nullptr) return;
  out.conditioning_size = read_size(loop, "conditioning_size", 1, kMostConditioning);
  if (!is_uniform || out.shift != 0) size->refuse("needs noise \"uniform\" and shift 0");
}

std::vector<std::pair<int32_t, int32_t>> read_unused(const json::Value& loop,
                                                     const Denoiser& denoiser) {
  std::vector<std::pair<int32_t, int32_t>> ranges;
  if (loop.find("unused_tokens") == nullptr) return ranges;
  int64_t next = 0, count = 0;
  for (const json::Value& range : loop.array("unused_tokens")) {
    std::vector<int64_t> ends;
    for (const json::Value& end : range.elements())
      ends.push_back(end.integer(next, denoiser.vocab_size)), next = ends.back() + 1;
    if (ends.size() != 2) range.refuse("must be two ids, the first id and the id after the last");
    const auto first = static_cast<int32_t>(ends[0]), last = static_cast<int32_t>(ends[1]);
    const auto is_inside = [=](int32_t token) { return first <= token && token < last; };
    if (is_inside(denoiser.mask_token_id) ||
        std::any_of(denoiser.eos_token_ids.begin(), denoiser.eos_token_ids.end(), is_inside))
      range.refuse("contains the mask token or an end token");
    ranges.emplace_back(first, last);
    count += last - first;
  }
  if (count >= denoiser.vocab_size - 1) loop.at("unused_tokens").refuse("leaves no token");
  return ranges;
}

// Checks an expand or split token, and the delete token.
void check_resizing(const Denoiser& denoiser, const std::function<void(const char*)>& refuse) {
  const int32_t remove = denoiser.delete_token_id;
  const int32_t insert = denoiser.rewrites() ? denoiser.split_token_id : denoiser.expand_token_id;
  if (insert == remove || insert == denoiser.mask_token_id || remove == denoiser.mask_token_id)
    refuse("must differ from delete_token_id, and neither may be the mask token");
  const bool has_blocks = denoiser.visible_block > 0 && denoiser.draft_block == 0;
  if (denoiser.rewrites() && (denoiser.resizes() || !has_blocks || denoiser.shift != 0))
    refuse("needs block-causal attention and shift 0, and no draft passes and no expand_token_id");
  if (denoiser.resizes() && (denoiser.visible_block > 0 || !denoiser.has_mask_token()))
    refuse("needs full attention and a mask token");
}

Denoiser read_denoiser(const json::Value& loop) {
  Denoiser out{};
  out.vocab_size = read_size(loop, "vocab_size", 3, 1 << 24);
  out.max_canvas_length = read_size(loop, "max_canvas_length", 1, 1 << 24);
  out.shift = read_size(loop, "shift", 0, 1);
  if (loop.find("visible_block") != nullptr)
    out.visible_block = read_size(loop, "visible_block", 1, 1 << 24);
  if (const json::Value* const draft = loop.find("draft_block"); draft != nullptr) {
    out.draft_block = read_size(loop, "draft_block", 1, 1 << 24);
    if (out.visible_block != 1) draft->refuse("needs visible_block 1");
  }
  if (const json::Value* const updates = loop.find("draft_updates"); updates != nullptr) {
    out.has_draft_updates = updates->boolean();
    if (!out.has_draft_updates) updates->refuse("must be true if it is there");
    if (out.draft_block == 0) updates->refuse("needs draft_block");
  }
  read_noise(loop, out);
  if (const json::Value* const shifted = loop.find("shifted_drafts"); shifted != nullptr) {
    out.has_shifted_drafts = shifted->boolean();
    if (!out.has_shifted_drafts) shifted->refuse("must be true if it is there");
    if (out.draft_block == 0 || out.shift == 0 || !out.has_mask_token())
      shifted->refuse("needs draft_block, shift 1 and a mask token");
  }
  if (const json::Value* const after = loop.find("blocks_after_prompt"); after != nullptr) {
    out.blocks_after_prompt = after->boolean();
    if (!out.blocks_after_prompt) after->refuse("must be true if it is there");
    if (out.visible_block == 0 || out.draft_block > 0)
      after->refuse("needs visible_block, and no draft_block");
  }
  for (const json::Value& eos : loop.array("eos_token_ids")) {
    out.eos_token_ids.push_back(static_cast<int32_t>(eos.integer(0, out.vocab_size - 1)));
    if (out.eos_token_ids.back() == out.mask_token_id) eos.refuse("an end token is the mask token");
  }
  out.unused_tokens = read_unused(loop, out);
  const auto read_token = [&](const char* name) {
    return loop.find(name) == nullptr ? -1 : read_size(loop, name, 0, out.vocab_size - 1);
  };
  out.split_token_id = read_token("split_token_id");
  out.expand_token_id = read_token("expand_token_id");
  if (out.rewrites() || out.resizes() || loop.find("delete_token_id") != nullptr) {
    out.delete_token_id = read_size(loop, "delete_token_id", 0, out.vocab_size - 1);
    const json::Value& insert = loop.at(out.rewrites() ? "split_token_id" : "expand_token_id");
    check_resizing(out, [&](const char* why) { insert.refuse(why); });
  }
  const json::Value& graph = loop.object("graph");
  out.top_k = read_size(graph, "top_k", 2, std::min(64, out.vocab_size - 1));
  out.cache = read_cache(graph, out.draft_block > 0);
  out.has_cache = true;
  return out;
}

GraphSpec read_graph(const json::Value& graph, const json::Value& files, const std::string& folder,
                     const Denoiser& denoiser) {
  graph.refuse_unknown({"file", "device_file", "simulated", "top_k", "cache_dtype", "ports"});
  const bool has_device = graph.find("device_file") != nullptr;
  // Older bundles of denoisers without a mask token do not say which layers have a window. Their
  // graphs expect the cached row of position i in row i.
  const bool is_in_order =
      !denoiser.has_mask_token() && !denoiser.has_causal_drafts() && window_of(denoiser.cache) == 0;
  return {folder + "/" + listed(files, graph.at("file")),
          has_device ? folder + "/" + listed(files, graph.at("device_file")) : "",
          denoiser.vocab_size,
          denoiser.top_k,
          denoiser.cache,
          read_cache_type(graph),
          graph.boolean("simulated"),
          read_ports(graph, denoiser.conditioning_size > 0, window_of(denoiser.cache) > 0),
          denoiser.conditioning_size,
          is_in_order};
}

Profile read_profile(const json::Value& profile) {
  profile.refuse_unknown({"tokens", "cached", "rows"});
  const auto sizes = [&](const char* key) {
    const std::vector<json::Value>& items = profile.array(key);
    if (items.size() != 3) profile.at(key).refuse("expected three sizes: smallest, best, largest");
    Sizes out{};
    int32_t* const fields[] = {&out.smallest, &out.best, &out.largest};
    int32_t low = 0;
    for (size_t i = 0; i < 3; ++i)
      low = *fields[i] = static_cast<int32_t>(items[i].integer(low, 1 << 24));
    return out;
  };
  return {sizes("tokens"), sizes("cached"), sizes("rows")};
}

// Returns true if the text is a version, for example "10.14.1.48". The build number may be missing,
// as in "10.14.1".
bool is_version(const std::string& text) {
  const auto dots = std::count(text.begin(), text.end(), '.');
  return (dots == 2 || dots == 3) && text.size() <= 40 && text.front() != '.' &&
         text.back() != '.' && text.find("..") == std::string::npos &&
         text.find_first_not_of("0123456789.") == std::string::npos;
}

bool is_target_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
}

// Returns advice on how to run a bundle for GPUs. The manifest's list "targets" may be missing or
// have a wrong type, because only the exporter checks this list.
std::string device_advice(const json::Value& root, const std::string& folder) {
  using Kind = json::Value::Kind;
  const json::Value* const targets = root.find("targets");
  std::string first;
  if (targets != nullptr && targets->kind() == Kind::array && !targets->elements().empty() &&
      targets->elements()[0].kind() == Kind::string)
    first = targets->elements()[0].string();
  if (first == "cuda") return "Open it with provider \"cuda\"";
  return "Build one: dlm-export engine " + folder + " --target " +
         (is_target_name(first) ? first : "TARGET");
}

// Reads the entry of one TensorRT engine. If `is_run` is true, a TensorRT engine may run, so the
// function also checks the hashes of the files from which this engine was built.
EngineSpec read_engine(const json::Value& entry, const json::Value& graph, const json::Value& files,
                       const std::string& folder, bool is_run) {
  const std::string& target = entry.key();
  if (!is_target_name(target))
    entry.refuse("is not a target's name: lower-case letters, digits and hyphens");
  const std::string again = "copy the bundle again, or build the engine again (dlm-export engine " +
                            folder + " --target " + target + " --force)";
  entry.refuse_unknown(
      {"file", "builder", "version", "version_compatible", "sm", "built_from", "profiles", "seal"});
  EngineSpec engine;
  engine.target = target;
  engine.bundle = folder;
  engine.path = folder + "/" + listed(files, entry.at("file"));
  if (entry.string("file") != kEngines + target + ".engine")
    entry.at("file").refuse("is not " + (kEngines + target) + ".engine");
  engine.builder = entry.string("builder");
  if (engine.builder != "tensorrt" && engine.builder != "tensorrt_rtx")
    entry.at("builder").refuse("expected \"tensorrt\" or \"tensorrt_rtx\"");
  engine.version = entry.string("version");
  if (!is_version(engine.version))
    entry.at("version").refuse("expected a version such as \"10.14.1.48\"");
  if (const json::Value* const found = entry.find("version_compatible"))
    engine.is_version_compatible = found->boolean();
  for (const json::Value& sm : entry.array("sm"))
    engine.sm.push_back(static_cast<int32_t>(sm.integer(50, 199)));
  if (engine.sm.empty())
    entry.at("sm").refuse("names no compute capability: expected at least one, such as 89 for 8.9");
  const json::Value& profiles = entry.object("profiles");
  profiles.refuse_unknown({"prefill", "block"});
  engine.prefill = read_profile(profiles.object("prefill"));
  engine.block = read_profile(profiles.object("block"));
  const json::Value& built_from = entry.object("built_from");
  built_from.refuse_unknown({"judged", "device", "weights"});
  const std::pair<const char*, std::string> origins[] = {
      {"judged", listed(files, graph.at("file"))},
      {"device", listed(files, graph.at("device_file"))},
      {"weights", graph.string("file") + ".data"}};
  for (const auto& [key, file] : origins)
    if (read_hash(built_from, key) != read_hash(files.object(file), "sha256") && is_run)
      built_from.at(key).refuse("was built from a graph other than this bundle's " + file + ": " +
                                again);
  if (read_hash(entry, "seal") != sha256_hex(entry.canonical("seal")) && is_run)
    entry.refuse("was edited after it was written: " + again);
  return engine;
}

dlm_policy read_preset(const json::Value& preset) {
  dlm_policy policy = default_policy();
  std::vector<std::string_view> known;
  for (const dlm_policy_field& field : kPolicyFields) known.push_back(field.name);
  preset.refuse_unknown(known);
  for (const dlm_policy_field& field : kPolicyFields) {
    const json::Value* const found = preset.find(field.name);
    if (found == nullptr) continue;
    if (field.kind == DLM_FIELD_CHOICE) {
      const char* const choice = canonical_choice(field, found->string());
      if (choice == nullptr)
        found->refuse(json::quoted(found->string()) + " is not known to this runtime");
      set_field(policy, field, choice);
    } else if (field.kind == DLM_FIELD_INT32) {
      const auto lowest = static_cast<int64_t>(field.lowest),
                 highest = static_cast<int64_t>(field.highest);
      set_field(policy, field, static_cast<int32_t>(found->integer(lowest, highest)));
    } else if (field.kind == DLM_FIELD_UINT64) {
      set_field(policy, field, static_cast<uint64_t>(found->integer(0, INT64_MAX)));
    } else {
      set_field(policy, field, found->number(-1e300, 1e300));
    }
  }
  try {
    check_policy(policy);
  } catch (const Error& error) {
    preset.refuse(error.what());
  }
  return policy;
}

// Reads `loop.effort`, which contains one policy for each effort level.
Policies read_efforts(const json::Value& effort, const json::Value& presets) {
  effort.refuse_unknown({"preset", "levels"});
  if (presets.find(effort.string("preset")) == nullptr)
    effort.at("preset").refuse("is not one of presets");
  const json::Value& levels = effort.object("levels");
  levels.refuse_unknown({std::begin(kEfforts), std::end(kEfforts)});
  Policies found;
  for (const char* const level : kEfforts)
    found.emplace_back(level, read_preset(levels.object(level)));
  return found;
}

// Reads the name of the bundle's text file (tokenizer and chat template). If the build wrote no
// text file, reads the reason.
void read_text_entry(const json::Value& root, const json::Value& files, const std::string& folder,
                     bool check_hashes, Manifest& manifest) {
  const json::Value* const entry = root.find("text");
  if (entry == nullptr) {
    manifest.text_refusal = "it has no tokenizer, or an old version of dlm-export built it";
    return;
  }
  if (entry->find("file") == nullptr) {
    entry->refuse_unknown({"refused"});
    manifest.text_refusal = entry->string("refused");
    return;
  }
  entry->refuse_unknown({"file", "chat_refused"});
  if (entry->find("chat_refused") != nullptr) entry->string("chat_refused");
  const std::string name = listed(files, entry->at("file"));
  manifest.text_path = folder + "/" + name;
  if (check_hashes) manifest.text_sha256 = read_hash(files.object(name), "sha256");
}

Manifest interpret(const std::string& text, const std::string& folder, bool check_hashes,
                   const std::string& engine, Records records) {
  const auto root = json::parse(text, kManifestLimitBytes);
  const int64_t version = root->integer("schema_version", 1, INT32_MAX);
  if (version != kSchemaVersion)
    fail(DLM_BAD_BUNDLE,
         "schema_version %lld: this runtime reads version %lld only. Build the bundle again with "
         "`dlm-export build CHECKPOINT -o %s --force`, or update dlm-export if the bundle is newer",
         static_cast<long long>(version), static_cast<long long>(kSchemaVersion), folder.c_str());
  // This function checks only loop and files. The exporter checks the other members against
  // manifest.schema.json.
  root->refuse_unknown({"schema_version", "producer", "loop", "default_loop", "network", "opset",
                        "source", "precision", "kernels", "targets", "tokenizer", "chat_template",
                        "json_layout", "call_format", "text", "effort", "audits", "files"});
  const json::Value &loop = root->object("loop"), &files = root->object("files");
  loop.refuse_unknown({"vocab_size",
                       "mask_token_id",
                       "eos_token_ids",
                       "unused_tokens",
                       "expand_token_id",
                       "delete_token_id",
                       "split_token_id",
                       "max_canvas_length",
                       "shift",
                       "visible_block",
                       "draft_block",
                       "shifted_drafts",
                       "blocks_after_prompt",
                       "draft_updates",
                       "noise",
                       "conditioning_size",
                       "graph",
                       "presets",
                       "default_preset",
                       "max_new_tokens",
                       "effort",
                       "engines"});
  Manifest manifest;
  manifest.text = text;
  manifest.denoiser = read_denoiser(loop);
  const json::Value& graph = loop.object("graph");
  manifest.graph = read_graph(graph, files, folder, manifest.denoiser);
  manifest.graph_sha256 = hash_graph(files, graph.at("file").string());
  manifest.is_for_gpus = graph.find("device_file") != nullptr;
  if (manifest.is_for_gpus) manifest.device_advice = device_advice(*root, folder);
  const json::Value& presets = loop.object("presets");
  for (const json::Value& preset : presets.members())
    manifest.presets.emplace_back(preset.key(), read_preset(preset));
  manifest.default_preset = loop.string("default_preset");
  if (presets.find(manifest.default_preset) == nullptr)
    loop.at("default_preset").refuse("is not one of presets");
  if (loop.find("max_new_tokens") != nullptr)
    manifest.denoiser.max_new_tokens =
        static_cast<int32_t>(loop.integer("max_new_tokens", 1, 1 << 24));
  if (loop.find("effort") != nullptr) {
    manifest.efforts = read_efforts(loop.object("effort"), presets);
    manifest.effort_preset = loop.object("effort").string("preset");
  }
  manifest.engine = engine != "auto" ? engine : manifest.is_for_gpus ? "tensorrt" : "onnxruntime";
  const bool is_run = manifest.engine == "tensorrt";
  if (loop.find("engines") != nullptr)
    for (const json::Value& entry : loop.object("engines").members())
      manifest.engines.push_back(read_engine(entry, graph, files, folder, is_run));
  read_text_entry(*root, files, folder, check_hashes, manifest);
  manifest.unhashed = check_files(files, folder, check_hashes, is_run, records);
  return manifest;
}

[[noreturn]] void refuse_hash(const std::string& path, const char* advice) {
  fail(DLM_BAD_BUNDLE,
       "%s: its SHA-256 differs from the manifest's: the file is damaged or was changed. %s",
       path.c_str(), advice);
}

}  // namespace

void check_hash(const FileHash& file) {
  if (!has_sha256(file.path, file.sha256, file.records)) refuse_hash(file.path, file.advice);
}

std::shared_ptr<const Text> read_text(const Manifest& manifest) {
  const std::string& path = manifest.text_path;
  if (path.empty())
    fail(DLM_UNSUPPORTED,
         "this bundle has no compiled text: %s. Pass token ids instead, or use Python, which "
         "runs any tokenizer",
         manifest.text_refusal.c_str());
  const std::string data = read_file(path, kTextLimitBytes, "it");
  // The file was hashed when the bundle was opened, but the file may have been replaced since then.
  if (!manifest.text_sha256.empty() && sha256_hex(data) != manifest.text_sha256)
    refuse_hash(path, kAgain);
  return std::make_shared<const Text>(data.data(), data.size(), path);
}

Manifest read_bundle(const std::string& path, bool check_hashes, const std::string& engine) {
  std::string folder = path;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  const std::string text = read_manifest(folder);
  const Records chosen = check_hashes ? chosen_records() : Records::none;
  const Records records = chosen == Records::use && engine == "none" ? Records::write : chosen;
  try {
    return interpret(text, folder, check_hashes, engine, records);
  } catch (const Error& error) {
    const std::string message = error.what();
    // If the error is about a file, the message already starts with the path of that file.
    // Otherwise the error is about the content of the manifest, so add the path of the manifest.
    if (message.compare(0, folder.size(), folder) == 0) throw;
    throw Error(error.status(), folder + "/" + kManifest + ": " + message);
  }
}

Denoiser check_denoiser(const dlm_denoiser& d) {
  const auto in_range = [](const std::string& name, int64_t value, int64_t low, int64_t high) {
    check_range(("dlm_denoiser: " + name).c_str(), value, low, high);
  };
  in_range("vocab_size", d.vocab_size, 3, 1 << 24);
  in_range("mask_token_id", d.mask_token_id, 0, d.vocab_size);
  in_range("max_canvas_length", d.max_canvas_length, 1, 1 << 24);
  in_range("layers", d.layers, 1, 1024);
  in_range("kv_heads", d.kv_heads, 1, 4096);
  in_range("head_size", d.head_size, 1, 4096);
  in_range("top_k", d.top_k, 2, std::min(64, d.vocab_size - 1));
  in_range("kv_element_bytes", d.kv_element_bytes, 1, 8);
  in_range("shift", d.shift, 0, 1);
  in_range("max_new_tokens", d.max_new_tokens, 1, 1 << 24);
  in_range("visible_block", d.visible_block, 0, 1 << 24);
  in_range("draft_block", d.draft_block, 0, 1 << 24);
  if (d.draft_block > 0 && (d.visible_block != 1 || d.has_cache == 0))
    fail(DLM_INVALID_ARGUMENT, "dlm_denoiser: draft_block needs visible_block 1 and has_cache 1");
  if (d.mask_token_id == d.vocab_size && d.draft_block == 0)
    fail(
        DLM_INVALID_ARGUMENT,
        "dlm_denoiser: mask_token_id = vocab_size means that the denoiser has no mask token, which "
        "needs draft_block above 0");
  in_range("conditioning_size", d.conditioning_size, 0, kMostConditioning);
  if (d.conditioning_size > 0 && (d.mask_token_id != d.vocab_size || d.shift == 1))
    fail(
        DLM_INVALID_ARGUMENT,
        "dlm_denoiser: conditioning_size needs shift 0 and mask_token_id = vocab_size, which means "
        "that the denoiser has no mask token");
  in_range("shifted_drafts", d.shifted_drafts, 0, 1);
  if (d.shifted_drafts == 1 &&
      (d.draft_block == 0 || d.shift == 0 || d.mask_token_id == d.vocab_size))
    fail(DLM_INVALID_ARGUMENT,
         "dlm_denoiser: shifted_drafts needs draft_block, shift 1 and a mask token");
  in_range("blocks_after_prompt", d.blocks_after_prompt, 0, 1);
  if (d.blocks_after_prompt == 1 && (d.visible_block == 0 || d.draft_block > 0))
    fail(DLM_INVALID_ARGUMENT,
         "dlm_denoiser: blocks_after_prompt needs visible_block above 0, and draft_block 0");
  if ((d.eos_count > 0) != (d.eos_token_ids != nullptr))
    fail(DLM_INVALID_ARGUMENT, "dlm_denoiser: eos_token_ids is %s, but eos_count is %zu",
         d.eos_token_ids == nullptr ? "NULL" : "set", d.eos_count);
  if (d.eos_count > 1024)
    fail(DLM_INVALID_ARGUMENT, "dlm_denoiser: eos_count = %zu is outside 0..1024", d.eos_count);
  Denoiser out{};
  out.vocab_size = d.vocab_size, out.mask_token_id = d.mask_token_id;
  out.max_canvas_length = d.max_canvas_length;
  out.top_k = d.top_k, out.shift = d.shift;
  out.has_cache = d.has_cache != 0;
  out.visible_block = static_cast<int32_t>(d.visible_block);
  out.max_new_tokens = d.max_new_tokens;
  out.draft_block = static_cast<int32_t>(d.draft_block);
  out.conditioning_size = static_cast<int32_t>(d.conditioning_size);
  out.has_shifted_drafts = d.shifted_drafts == 1;
  out.blocks_after_prompt = d.blocks_after_prompt == 1;
  out.cache.assign(static_cast<size_t>(d.layers), {d.kv_heads, d.head_size, d.kv_element_bytes});
  for (size_t i = 0; i < d.eos_count; ++i) {
    in_range("eos_token_ids", d.eos_token_ids[i], 0, d.vocab_size - 1);
    if (d.eos_token_ids[i] == d.mask_token_id)
      fail(DLM_INVALID_ARGUMENT, "dlm_denoiser: an end token is the mask token");
    out.eos_token_ids.push_back(d.eos_token_ids[i]);
  }
  const bool splits = d.split_token_id != -1;
  if (!splits && d.expand_token_id == -1 && d.delete_token_id == -1) return out;
  if (splits) in_range("split_token_id", d.split_token_id, 0, d.vocab_size - 1);
  if (!splits || d.expand_token_id != -1)
    in_range("expand_token_id", d.expand_token_id, 0, d.vocab_size - 1);
  in_range("delete_token_id", d.delete_token_id, 0, d.vocab_size - 1);
  out.expand_token_id = d.expand_token_id, out.delete_token_id = d.delete_token_id;
  out.split_token_id = d.split_token_id;
  check_resizing(out, [&](const char* why) {
    fail(DLM_INVALID_ARGUMENT, "dlm_denoiser: %s %s", splits ? "split_token_id" : "expand_token_id",
         why);
  });
  return out;
}

}  // namespace dlm
