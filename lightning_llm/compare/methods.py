"""The method behind verdicts, with sources: the one text of the report, of `compare.json` and of the docs."""

from lightning_llm.compare.power import PLANNED_GAP, POWER
from lightning_llm.compare.stability import OUTLIER_FACTOR, STABILITY_MARGIN

METHODS = (
    "Runs of the same seed share initial weights and the order of the data, so they are compared in pairs. A pair's "
    "difference is taken of the tail of the validation loss: the mean over the validations in the last part of the "
    "steps that all runs have. The gap is the mean difference over the seeds at which neither run failed.",
    "Intervals hold together for all recipes that share a baseline: C. W. Dunnett, A multiple comparison procedure for "
    "comparing several treatments with a control, J. Am. Stat. Assoc. 50 (1955) 1096-1121, with seeds as blocks; the "
    "multivariate t is integrated by quadrature (about it: A. Genz and F. Bretz, Computation of Multivariate Normal "
    "and t Probabilities, Springer 2009).",
    "The variance is pooled over recipes of like spread, with degrees of freedom by F. E. Satterthwaite, Biometrics "
    "Bull. 2 (1946) 110-114. A recipe whose spread stands out (F test) keeps its own: M. Hasler and L. A. Hothorn, "
    "Biometrical J. 50 (2008) 793-800. One pair shows no spread, and decides nothing.",
    "By loss a recipe is lossless where the interval's upper bound is below the margin (non-inferiority: ICH E9, "
    "Statistical principles for clinical trials, 1998, section 3.3.2), lossy where its lower bound is above it, and "
    "otherwise inconclusive.",
    "Looks that a sweep declared before its first run share out the error by a spending function (K. K. G. Lan and D. "
    "L. DeMets, Biometrika 70 (1983) 659-663), with boundaries drawn for this very procedure. Intervals then hold "
    "together over all looks, too: C. Jennison and B. W. Turnbull, J. R. Stat. Soc. B 51 (1989) 305-361.",
    "A run failed where it diverged, or where fewer than half of a recipe's pairs lie more than "
    f"{OUTLIER_FACTOR:g} times as far from zero as the margin, the A/A floor, the recipe's other pairs and the median "
    "of the other recipes' pairs. Failure rates have exact intervals: C. J. Clopper and E. S. Pearson, Biometrika 26 "
    "(1934) 404-413. A recipe is unstable where it failed and the baseline did not at more seeds than the other way "
    "round, by McNemar's test, exact and unconditional (S. Suissa and J. J. Shuster, Biometrics 47 (1991) 361-372), "
    "one-sided, shared out over the recipes (Bonferroni).",
    "The verdict is lossy where the loss or the stability says so. It is lossless where the loss says so, no run is "
    "missing, and the recipe failed alone at no more seeds than the baseline did, or so few of so many that the rate "
    f"is shown to be below {100 * STABILITY_MARGIN:g} %. A baseline whose loss is not below the entropy of the tokens' "
    "frequencies (where that is not recorded, 0.9 ln(vocabulary)) has not learned, and gives no verdict.",
    f"Seeds are planned for true gaps of 0 and of {PLANNED_GAP} margins, for a probability of {100 * POWER:g} % of "
    "the right verdict, averaged over what the true spread may be, given the one found (A. O'Hagan, J. W. Stevens and "
    "M. J. Campbell, Pharmaceut. Statist. 4 (2005) 187-201).",
    "The A/A floor is the root mean square difference between runs of one recipe and seed that differ in the order of "
    "sums alone (another micro-batch size, thread count or reduction).",
    "Branches off one checkpoint of a trunk are compared over their own steps, and what is found holds for a recipe "
    "that is switched on there. Replicates are trunks of several seeds; seeds after one trunk speak of what follows it "
    "alone, and several such trunks are judged apart (pseudoreplication: S. H. Hurlbert, Ecological Monographs 54 "
    "(1984) 187-211).",
    "Time to loss is the ratio of the tokens, and of the training seconds, that recipe and baseline took to the lowest "
    "loss that both reached.",
)
