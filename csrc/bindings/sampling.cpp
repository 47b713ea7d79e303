// Tokens drawn from rows of logits.
#include "bindings/bindings.h"

#include <limits>

#include "bindings/addresses.h"
#include "docs.h"
#include "sampling/sample_rows.h"

namespace kvpage {

namespace {

// The rules of a batch's rows, which this call alone uses until it ends. Keeps rules and tokens alive.
class HeldRules {
 public:
  // rules, tokens: a TokenRules or None, and an int32 array or None, for each row. Both empty: no row has any.
  HeldRules(const py::sequence& rules, const py::sequence& tokens, const RowRules* rows, int64_t num_rows) {
    if (rules.size() == 0) return;
    check(static_cast<int64_t>(rules.size()) == num_rows && static_cast<int64_t>(tokens.size()) == num_rows,
          "rules and tokens must be one for each of ", num_rows, " rows, got ", rules.size(), " and ", tokens.size());
    rows_.resize(static_cast<size_t>(num_rows));
    try {
      for (size_t row = 0; row < rows_.size(); ++row) hold(rules[row], tokens[row], rows[row], row);
    } catch (...) {
      give_back();
      throw;
    }
  }
  ~HeldRules() { give_back(); }
  HeldRules(const HeldRules&) = delete;
  HeldRules& operator=(const HeldRules&) = delete;

  const RuledRow* rows() const { return rows_.empty() ? nullptr : rows_.data(); }

 private:
  using Tokens = py::array_t<int32_t, py::array::c_style>;

  void hold(const py::object& rules, const py::object& tokens, const RowRules& numbers, size_t row) {
    if (rules.is_none()) return;
    auto* held = rules.cast<TokenRules*>();
    check(numbers.position >= 0, "position must not be negative, got ", numbers.position, " in row ", row);
    check(numbers.position <= std::numeric_limits<int64_t>::max() - held->num_prompt_tokens(),
          "position must be at most 2**63 - 1 with num_prompt_tokens added, got ", numbers.position, " in row ", row);
    const int32_t* ids = nullptr;
    if (held->needs_tokens()) {
      check(Tokens::check_(tokens), "tokens must be a contiguous int32 array, got another in row ", row);
      const auto array = py::reinterpret_borrow<Tokens>(tokens);
      const int64_t num_tokens = held->num_prompt_tokens() + numbers.position;
      check(array.ndim() == 1 && array.size() >= num_tokens, "tokens must be at least ", num_tokens,
            " in one dimension, got ", array.size(), " in row ", row);
      ids = array.data();
    }
    check(held->take(), "rules must be those of one row of one call at a time, got them twice in row ", row);
    rows_[row] = {held, ids};
    alive_.push_back(rules);
    alive_.push_back(tokens);
  }

  void give_back() {
    for (RuledRow& row : rows_)
      if (row.rules) row.rules->give_back();
  }

  std::vector<RuledRow> rows_;
  std::vector<py::object> alive_;
};

using Logits = std::array<int64_t, 5>;  // address, row stride in bytes, RowType, num_rows, vocab_size

void sample_rows_of(const Logits& logits, const py::array& rows, const py::sequence& rules, const py::sequence& tokens,
                    const py::array_t<int32_t>& out, int max_threads, const std::string& kernel) {
  const int64_t num_rows = logits[3];
  check(rows.itemsize() == sizeof(RowRules) && rows.ndim() == 1 && rows.size() == num_rows &&
            (num_rows < 2 || rows.strides(0) == rows.itemsize()),
        "rows must be ", num_rows, " contiguous records of ", sizeof(RowRules), " bytes");
  check(out.ndim() == 1 && out.size() == num_rows && (num_rows < 2 || out.strides(0) == out.itemsize()), "out must be ",
        num_rows, " contiguous int32");
  const auto* numbers = static_cast<const RowRules*>(rows.data());
  const HeldRules held(rules, tokens, numbers, num_rows);
  auto* chosen = static_cast<int32_t*>(py::array(out).mutable_data());
  py::gil_scoped_release released;
  sample_rows({pointer<const std::byte>(logits[0]), logits[1], static_cast<RowType>(logits[2]), num_rows, logits[4],
               numbers, held.rows(), chosen, max_threads, kernel});
}

}  // namespace

void bind_sampling(py::module_& m) {
  using Ids = std::vector<int64_t>;
  py::class_<TokenRules>(m, "TokenRules", doc("TokenRules"))
      .def(py::init([](Ids biased_ids, std::vector<float> biases, Ids stop_ids, int64_t shortest, Ids suppressed_ids,
                       Ids first_ids, int64_t first_at, const std::array<float, 3>& penalties,
                       int64_t num_prompt_tokens) {
             return std::make_unique<TokenRules>(TokenRuleSet{std::move(biased_ids),
                                                              std::move(biases),
                                                              std::move(stop_ids),
                                                              shortest,
                                                              std::move(suppressed_ids),
                                                              std::move(first_ids),
                                                              first_at,
                                                              {penalties[0], penalties[1], penalties[2]},
                                                              num_prompt_tokens});
           }),
           py::kw_only(), py::arg("biased_ids"), py::arg("biases"), py::arg("stop_ids"), py::arg("shortest"),
           py::arg("suppressed_ids"), py::arg("first_ids"), py::arg("first_at"), py::arg("penalties"),
           py::arg("num_prompt_tokens"), doc("TokenRules.__init__"))
      .def(
          "allow",
          [](TokenRules& rules, const py::array_t<uint32_t, py::array::c_style>& mask) {
            check(mask.ndim() == 1, "mask must have one dimension, got ", mask.ndim());
            rules.allow(mask.data(), mask.size());
          },
          py::arg("mask").noconvert(), doc("TokenRules.allow"))
      .def_property_readonly("needs_tokens", &TokenRules::needs_tokens, doc("TokenRules.needs_tokens"));
  PYBIND11_NUMPY_DTYPE(RowRules, seed, position, top_k, top_p, temperature, least_score);
  m.attr("ROW_RULES") = py::dtype::of<RowRules>();
  m.def("sample_rows", &sample_rows_of, py::arg(), py::arg(), py::arg(), py::arg(), py::arg().noconvert(), py::arg(),
        py::arg("kernel") = "", doc("sample_rows"));
  m.def("sampling_kernels", [] { return sampling_kernels().names(); }, doc("sampling_kernels"));
}

}  // namespace kvpage
