"""Generate access policies in the schema of AWS IAM, and tell exactly which ones grant access.

The label of a policy is whether anyone, without signing in, can read the objects of the bucket
``data``: a statement allows it without a condition, and none denies it. That is the evaluation
logic of the IAM User Guide ("Policy evaluation logic"), for one principal, action and resource.
"""

import random
from fnmatch import fnmatchcase
from typing import Any

READ = "s3:GetObject"
OBJECT = "arn:aws:s3:::data/report.csv"
_PRINCIPALS: list[Any] = [
    "*",
    {"AWS": "*"},
    {"AWS": ["*", "arn:aws:iam::111122223333:root"]},
    {"AWS": ["arn:aws:iam::111122223333:root"]},
    {"AWS": "arn:aws:iam::444455556666:role/build"},
    {"Service": "cloudtrail.amazonaws.com"},
]
_ACTIONS = [READ, "s3:Get*", "s3:*", "s3:PutObject", "s3:ListBucket", "s3:DeleteObject"]
_BUCKETS = ["data/*", "*", "data", "logs/*", "backup/*", "data/private/*"]
_RESOURCES = [f"arn:aws:s3:::{name}" for name in _BUCKETS]
_CONDITIONS: list[Any] = [
    {"Bool": {"aws:SecureTransport": "true"}},
    {"IpAddress": {"aws:SourceIp": ["192.0.2.0/24", "203.0.113.0/24"]}},
    {"StringEquals": {"aws:PrincipalOrgID": "o-exampleorgid"}},
]


def concerns(statement: dict[str, Any]) -> bool:
    """Return whether a statement applies to everyone who reads the object."""
    principal = statement["Principal"]
    who = principal if isinstance(principal, str) else principal.get("AWS", ())
    names = [who] if isinstance(who, str) else who
    does = any(fnmatchcase(READ, pattern) for pattern in statement["Action"])
    holds = any(fnmatchcase(OBJECT, pattern) for pattern in statement["Resource"])
    return "*" in names and does and holds and "Condition" not in statement


def is_public(policy: dict[str, Any]) -> bool:
    """Return whether a policy lets everyone read the object."""
    effects = {each["Effect"] for each in policy["Statement"] if concerns(each)}
    return effects == {"Allow"}


def draw_statement(draw: random.Random) -> dict[str, Any]:
    """Draw a statement, of which a tenth apply."""
    statement = {
        "Effect": draw.choices(["Allow", "Deny"], [4, 1])[0],
        "Principal": draw.choice(_PRINCIPALS),
        "Action": draw.sample(_ACTIONS, draw.randint(1, 3)),
        "Resource": draw.sample(_RESOURCES, draw.randint(1, 2)),
    }
    return statement | ({"Condition": draw.choice(_CONDITIONS)} if draw.random() < 0.4 else {})


def draw_policies(number: int, seed: int) -> list[dict[str, Any]]:
    """Draw policies, of which half are public."""
    draw, found = random.Random(seed), list[dict[str, Any]]()
    while len(found) < number:
        statements = [draw_statement(draw) for _ in range(draw.randint(2, 10))]
        policy = {"Version": "2012-10-17", "Statement": statements}
        if is_public(policy) == (len(found) % 2 == 0):
            found.append({**policy, "public": is_public(policy)})
    return draw.sample(found, number)
