// The types that weights have on a device which does not have all of them, as GPUs do not.
#include <functional>
#include <limits>
#include <set>

#include "golden.h"
#include "part.h"
#include "support/catch.h"

using namespace golden;

namespace {

llm::Settings settings_of(const Folder& folder, const char* weights = "stored") {
  llm::Settings s;
  s.directory = folder.path(), s.device = "cpu", s.threads = 2, s.quiet = true, s.cache = "fp32", s.weights = weights,
  s.context = 200;
  return s;
}

// The settings, which the session refers to, and a session on a device.
struct On {
  llm::Settings settings;
  llm::Session session;
  On(const llm::Settings& s, std::unique_ptr<llm::Device> device) : settings(s), session(settings) {
    session.device = std::move(device);
  }
  llm::Plan plan() { return llm::Model::plan(session.config, *session.weights, *session.device, session.options(1)); }
  double difference_from(const Json& golden) {
    session.load(1);
    const auto ids = golden["ids"].get<std::vector<int32_t>>();
    const Json& mark = golden["logits"].back();
    session.model->read(0, 0, ids.data(), mark["at"].get<int64_t>() + 1);
    return difference(session.model->logits(0), mark["values"].get<std::vector<float>>());
  }
  std::string refusal() {
    try {
      session.load(1);
    } catch (const llm::Error& e) {
      return e.what();
    }
    return "";
  }
};

std::map<std::string, llm::Tensor> some(const std::vector<std::pair<Type, int64_t>>& matrices) {
  std::map<std::string, llm::Tensor> out;
  for (const auto& [type, rows] : matrices)
    out[std::to_string(out.size())] = {type, {rows, 8}, nullptr, size_t(rows * 8 * llm::bits_of(type) / 8)};
  out["norm"] = {Type::f16, {1 << 20}, nullptr, 2 << 20};  // becomes floats, whatever it is
  return out;
}

// A file of tensors of several types, bf16 if it is not said.
std::string mixed(const std::vector<golden::Tensor>& tensors, const std::map<std::string, Type>& types) {
  return safetensors_of(tensors, [&](const std::string& name) {
    const auto at = types.find(name);
    return at == types.end() ? Type::bf16 : at->second;
  });
}

}  // namespace

TEST_CASE("activations have the type that is asked for or stored, and bf16 with weights of fp32") {
  const auto chosen = [](int wanted, const std::vector<std::pair<Type, int64_t>>& matrices) {
    return llm::activation_type(wanted, some(matrices));
  };
  CHECK(chosen(-1, {{Type::f32, 9}}) == Type::bf16);
  CHECK(chosen(-1, {{Type::f16, 9}}) == Type::f16);
  CHECK(chosen(-1, {{Type::bf16, 9}}) == Type::bf16);
  CHECK(chosen(-1, {{Type::f32, 9}, {Type::f16, 1}}) == Type::f16);
  CHECK(chosen(-1, {{Type::bf16, 1}, {Type::f16, 9}}) == Type::f16);
  CHECK(chosen(-1, {{Type::bf16, 9}, {Type::f16, 1}}) == Type::bf16);
  for (const Type codes : {Type::f32, Type::f8, Type::i8, Type::i4}) {
    CHECK(chosen(int(codes), {{Type::f32, 9}}) == Type::bf16);
    CHECK(chosen(int(codes), {{Type::f16, 9}}) == Type::f16);
  }
  CHECK(chosen(int(Type::bf16), {{Type::f16, 9}}) == Type::bf16);
  CHECK(chosen(int(Type::f16), {{Type::bf16, 9}}) == Type::f16);
}

TEST_CASE("weights of a type that a device does not have become one that it has") {
  const auto made = [](Type stored, int wanted, Type activations, const std::set<Type>& types) {
    return llm::type_on_device(stored, wanted, activations, [&](Type type) { return types.count(type) > 0; });
  };
  const std::set<Type> bf16 = {Type::bf16, Type::f8, Type::i8, Type::i4}, f16 = {Type::f16, Type::i8};
  for (const Type stored : {Type::f32, Type::f16, Type::bf16}) {
    CHECK(made(stored, -1, Type::bf16, bf16) == int(Type::bf16));
    CHECK(made(stored, -1, Type::f16, f16) == int(Type::f16));
    CHECK(made(stored, -1, Type::f32, {Type::f32, Type::f16, Type::bf16}) == int(stored));
    CHECK(made(stored, int(Type::i8), Type::bf16, bf16) == int(Type::i8));
    CHECK(made(stored, int(Type::f32), Type::bf16, bf16) == -1);
    CHECK(made(stored, -1, Type::f32, {Type::i8}) == -1);
  }
  CHECK(made(Type::f16, -1, Type::f32, {Type::f32, Type::bf16}) == int(Type::f32));  // which loses nothing
  CHECK(made(Type::f32, -1, Type::f32, {Type::f16, Type::bf16}) == int(Type::bf16));
}

TEST_CASE("models of fp32 run on devices without it") {
  for (const char* name : {"llama", "llama_tied", "gpt2", "phi3", "mixtral", "qwen2_moe"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    for (const Type type : {Type::bf16, Type::f16}) {
      On part(settings_of(folder), std::make_unique<Part>(std::set<Type>{type, Type::i8}));
      CHECK(part.difference_from(golden) < 2e-5);  // 16 bits hold these weights exactly
      const llm::Plan plan = part.plan();
      CHECK(plan.mapped == 0);
      CHECK(plan.weights == part.session.model->plan().weights);
      CHECK(plan.changes() == part.session.model->plan().changes());
      CHECK(plan.changes().find(std::string("converted from fp32 to ") + llm::name_of(type)) != std::string::npos);

      // The same bytes as if they were asked for, of which nothing is said.
      On asked(settings_of(folder, llm::name_of(type)), llm::make_cpu(2));
      CHECK(asked.plan().weights == plan.weights);
      CHECK(asked.plan().changes().empty());
      CHECK(asked.difference_from(golden) < 2e-5);
      CHECK(asked.session.model->weight_bytes() == part.session.model->weight_bytes());
      On all(settings_of(folder), llm::make_cpu(2));
      CHECK(all.plan().changes().empty());
    }
    // Embeddings and head, which keep 16 bits, are all that is changed.
    On codes(settings_of(folder, "int8"), std::make_unique<Part>(std::set<Type>{Type::bf16, Type::i8}));
    CHECK(codes.difference_from(golden) < 0.1);
    CHECK(codes.plan().changes().find("converted from fp32") != std::string::npos);
  }
}

TEST_CASE("a model takes the memory that its plan says") {
  for (const char* name : {"llama", "gpt2", "mixtral"}) {
    const Json golden = read(name);
    const ModelFolder folder(golden);
    for (const char* cache : {"fp32", "int8"}) {
      for (const int64_t texts : {1, 5}) {
        INFO(name << ", keys and values of " << cache << ", " << texts << " texts");
        llm::Settings settings = settings_of(folder, "int8");
        settings.cache = cache;
        auto device = std::make_unique<Part>(std::set<Type>{Type::bf16, Type::i8});
        const Part& part = *device;
        On on(settings, std::move(device));
        const llm::Plan plan =
            llm::Model::plan(on.session.config, *on.session.weights, *on.session.device, on.session.options(texts));
        CHECK(part.allocated() == 0);
        on.session.load(texts);
        CHECK(on.session.model->plan().total() == plan.total());
        CHECK(part.allocated() >= plan.total() - plan.total() / 50);
        CHECK(part.allocated() <= plan.total() + plan.total() / 50 + (16 << 10));
      }
    }
  }
}

TEST_CASE("a plan is right for a device with activations of 16 bits") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  llm::Settings settings = settings_of(folder);
  settings.cache = "auto";
  On part(settings, std::make_unique<Part>(std::set<Type>{Type::bf16}, Type::bf16));
  const llm::Plan plan = part.plan();
  size_t matrices = 0, vectors = 0;
  for (const auto& tensor : tensors_of(golden)) (tensor.shape.size() > 1 ? matrices : vectors) += tensor.values.size();
  CHECK(plan.weights >= 2 * matrices + 4 * vectors);
  CHECK(plan.weights <= 2 * matrices + 4 * vectors + 4 * 1024);  // zeros in place of biases
  CHECK(plan.mapped == 0);
  // Keys and values are of the type that the embedding has now.
  settings.cache = "bf16";
  CHECK(On(settings, std::make_unique<Part>(std::set<Type>{Type::bf16}, Type::bf16)).plan().cache == plan.cache);
}

TEST_CASE("single matrices of another type become the type of the others") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto tensors = tensors_of(golden);
  const std::string layer = "model.layers.0.";
  folder.write("model.safetensors", mixed(tensors, {{layer + "self_attn.o_proj.weight", Type::f32},
                                                    {layer + "mlp.down_proj.weight", Type::f16},
                                                    {"lm_head.weight", Type::f32},
                                                    {"model.norm.weight", Type::f32}}));
  On part(settings_of(folder), std::make_unique<Part>(std::set<Type>{Type::bf16}));
  CHECK(part.difference_from(golden) < 2e-5);
  CHECK(part.plan().changes() ==
        "2 matrices converted from fp32 to bf16, 1 matrix converted from fp16 to bf16 "
        "(the stored type is not compiled in for this device)");
  CHECK(part.plan().mapped > 0);
  CHECK(On(settings_of(folder), llm::make_cpu(2)).difference_from(golden) < 2e-5);
}

TEST_CASE("learned positions have the type of the embedding") {
  const Json golden = read("gpt2");
  for (const Type places : {Type::f32, Type::f16}) {
    const ModelFolder folder(golden);
    std::map<std::string, Type> types;
    for (const auto& tensor : tensors_of(golden)) {
      if (tensor.name.find("wpe.weight") != std::string::npos) types[tensor.name] = places;
    }
    REQUIRE(types.size() == 1);
    folder.write("model.safetensors", mixed(tensors_of(golden), types));
    CHECK(On(settings_of(folder), llm::make_cpu(2)).difference_from(golden) < 2e-5);
  }
}

TEST_CASE("numbers that are too large for fp16 are refused, and bf16 takes them") {
  const Json golden = read("llama");
  const auto with = [&](float x, const char* weights, const std::set<Type>& types) {
    const ModelFolder folder(golden);
    auto tensors = tensors_of(golden);
    for (auto& tensor : tensors) {
      if (tensor.name == "model.layers.1.mlp.up_proj.weight") tensor.values[77] = x;
    }
    folder.write("model.safetensors", safetensors(tensors, Type::f32));
    return On(settings_of(folder, weights), std::make_unique<Part>(types)).refusal();
  };
  const std::set<Type> all = {Type::f32, Type::f16, Type::bf16};
  for (const float x : {70000.f, -1e30f, 65520.f}) {
    const std::string why = with(x, "stored", {Type::f16});
    CHECK(why.find("model.layers.1.mlp.up_proj.weight") != std::string::npos);
    CHECK(why.find("bf16 is not compiled in") != std::string::npos);
    CHECK(why.find('\n') == std::string::npos);
    CHECK(with(x, "fp16", all).find("--weights bf16") != std::string::npos);
    CHECK(with(x, "bf16", all) == "");
    CHECK(with(x, "stored", {Type::bf16, Type::f16}) == "");
  }
  CHECK(with(65519.f, "fp16", all) == "");
  CHECK(with(std::numeric_limits<float>::infinity(), "fp16", all) == "");  // as it is stored
}

TEST_CASE("what a device cannot have is refused with the flag that helps") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto refusal = [&](llm::Settings settings, const std::set<Type>& types) {
    return On(settings, std::make_unique<Part>(types)).refusal();
  };
  std::string why = refusal(settings_of(folder, "fp32"), {Type::bf16, Type::i8});
  CHECK(why.find("which has bf16, int8") != std::string::npos);
  CHECK(why.find("-DKERNELS_LLM_WEIGHTS") != std::string::npos);
  why = refusal(settings_of(folder), {Type::i8});
  CHECK(why.find("embed_tokens.weight") != std::string::npos);
  CHECK(why.find("-DKERNELS_LLM_WEIGHTS") != std::string::npos);
  llm::Settings settings = settings_of(folder);
  settings.cache = "fp16";
  CHECK(refusal(settings, {Type::bf16}).find("--cache takes fp32, bf16") != std::string::npos);
}

TEST_CASE("inputs of 8 bits go with weights of the same type, and with devices that multiply them") {
  // As a GPU without such tensor cores.
  struct Older : Part {
    llm::ProductCalls calls;
    explicit Older(const std::set<Type>& types) : Part(types), calls(*products(Type::i8)) {
      calls.takes_codes = [](const llm::Place&) { return false; };
      calls_.products[int(Type::i8)] = &calls;
    }
  };
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const std::set<Type> all = {Type::f32, Type::f8, Type::i8, Type::i4};
  const auto refusal = [&](const char* inputs, const char* weights, std::unique_ptr<llm::Device> device) {
    llm::Settings settings = settings_of(folder, weights);
    settings.inputs = inputs;
    return On(settings, std::move(device)).refusal();
  };
  const auto has = [](const std::string& why, const char* part) { return why.find(part) != std::string::npos; };
  CHECK(refusal("int8", "int8", std::make_unique<Part>(all)) == "");
  CHECK(refusal("fp8", "fp8", std::make_unique<Part>(all)) == "");
  CHECK(refusal("auto", "fp32", std::make_unique<Part>(all)) == "");
  for (const char* weights : {"stored", "fp32", "fp8", "int4"})
    CHECK(has(refusal("int8", weights, std::make_unique<Part>(all)), "--inputs int8: needs --weights int8"));
  CHECK(has(refusal("fp8", "int8", std::make_unique<Part>(all)), "--inputs fp8: needs --weights fp8"));
  CHECK(refusal("int4", "int4", std::make_unique<Part>(all)) == "--inputs: int4 is not one of auto, fp8, int8");
  CHECK(has(refusal("int8", "int8", std::make_unique<Older>(all)), "--inputs int8: not supported by this GPU"));
}

TEST_CASE("an instruction set that a build does not have is refused with those that it has") {
  const char* const before = std::getenv("LLM_UNIT");
  const std::string kept = before != nullptr ? before : "", name = llm::make_cpu(1)->name();
  setenv("LLM_UNIT", "foo", 1);
  std::string why;
  try {
    llm::make_cpu(1);
  } catch (const llm::Error& e) {
    why = e.what();
  }
  before != nullptr ? setenv("LLM_UNIT", kept.c_str(), 1) : unsetenv("LLM_UNIT");
  CHECK(why.find("LLM_UNIT=foo") != std::string::npos);
  CHECK(why.find(name.substr(name.rfind(' ') + 1)) != std::string::npos);
  CHECK(why.find("-DKERNELS_LLM_UNITS") != std::string::npos);
}

TEST_CASE("nothing is copied beyond a buffer, and no text is longer than the context") {
  const auto refusal = [](const auto& f) {
    try {
      f();
    } catch (const llm::Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto device = llm::make_cpu(1);
  llm::Buffer<unsigned char> buffer(*device, 16, "a test");
  unsigned char bytes[32] = {};
  CHECK(refusal([&] { buffer.upload(bytes, 16), buffer.upload(bytes, 8, 8), buffer.upload(bytes, 0, 16); }) == "");
  CHECK(refusal([&] { buffer.download(bytes, 16), buffer.download(bytes, 8, 8); }) == "");
  for (const auto& part : {std::pair<size_t, size_t>{17, 0}, {8, 9}, {1, 16}, {1, SIZE_MAX}, {SIZE_MAX, 1}}) {
    const size_t size = part.first, at = part.second;
    CHECK(refusal([&] { buffer.upload(bytes, size, at); }).find("16 of a test") != std::string::npos);
    CHECK(refusal([&] { buffer.download(bytes, size, at); }).find("16 of a test") != std::string::npos);
  }

  const Json golden = read("llama");
  const ModelFolder folder(golden);
  llm::Settings settings = settings_of(folder);
  settings.context = 64;
  On on(settings, llm::make_cpu(1));
  on.session.load(2);
  llm::Model& model = *on.session.model;
  const std::vector<int32_t> fits(64, 1), longer(3000, 1);
  CHECK(refusal([&] { model.begin(1, fits, {}, 96, 1), model.read(1, 0, fits.data(), 64); }) == "");
  for (const std::string& why : {refusal([&] { model.begin(0, longer, {}, 96, 1); }),
                                 refusal([&] { model.read(0, 0, longer.data(), 3000); }),
                                 refusal([&] { model.step(3000); })}) {
    CHECK(why.find("3000 tokens") != std::string::npos);
    CHECK(why.find("64") != std::string::npos);
  }
  CHECK(refusal([&] { model.read(0, 60, fits.data(), 5); }).find("65 tokens") != std::string::npos);
  CHECK(refusal([&] { model.begin(2, fits, {}, 96, 1); }).find("sequence 2") != std::string::npos);
  CHECK(refusal([&] { model.begin(0, {}, {}, 96, 1); }).find("no tokens") != std::string::npos);
  CHECK(refusal([&] { model.read(0, 0, fits.data(), 0); }).find("no tokens") != std::string::npos);
}
